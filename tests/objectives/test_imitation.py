import pytest
import torch

from tba.config.objectives.imitation import (
    BestOfNConfig,
    MleSmoothingConfig,
    RaftConfig,
    RestConfig,
)
from tba.objectives.imitation import best_of_n, mle_smoothing, raft, rest

SECTIONS = {
    best_of_n: BestOfNConfig,
    raft: RaftConfig,
    rest: RestConfig,
    mle_smoothing: MleSmoothingConfig,
}


def _rest(log_pi, _, mask, reward, start=-0.5, end=0.5, progress=0.25):
    return rest(log_pi, mask, reward, progress, threshold_start=start, threshold_end=end)


def _mle(log_pi, log_ref, mask, reward, above=-0.25, likely=-1.4):
    return mle_smoothing(
        log_pi, log_ref, mask, reward, reward_threshold=above, log_ref_threshold=likely
    )


def _raft(log_pi, _, mask, reward, share=0.5):
    return raft(log_pi, mask, reward, keep_share=share)


def _best(log_pi, _, mask, reward):
    return best_of_n(log_pi, mask, reward)


FAMILY = {"best_of_n": _best, "raft": _raft, "rest": _rest, "mle_smoothing": _mle}
every_kind = pytest.mark.parametrize("kind", FAMILY)


def _batch(queries=3, samples=4, tokens=5, seed=0):
    """Ragged responses of several queries whose mean log-probabilities differ."""
    generator = torch.Generator().manual_seed(seed)
    shape = (queries, samples, tokens)
    lengths = torch.randint(1, tokens + 1, shape[:2], generator=generator)
    mask = torch.arange(tokens) < lengths.unsqueeze(-1)
    log_pi, log_ref = (
        -torch.rand(shape, generator=generator, dtype=torch.float64).where(mask, 0.0)
        for _ in range(2)
    )
    log_pi *= torch.arange(1, queries + 1).view(-1, 1, 1)
    reward = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
    return log_pi.requires_grad_(), log_ref, mask, reward


def _loss(kind, batch):
    return FAMILY[kind](*batch).loss


def _grad(kind, batch):
    return torch.autograd.grad(_loss(kind, batch), batch[0])[0]


def _kept(kind, log_ref, reward):
    """Weights of one query, by sorting; the thresholds are the defaults of this file."""
    order = sorted(range(len(reward)), key=lambda j: -reward[j])
    if kind in ("best_of_n", "raft"):
        kept = order[: 1 if kind == "best_of_n" else len(reward) // 2]
    elif kind == "rest":
        kept = [j for j in order if reward[j] > -0.25]  # -.5 + (.5 + .5) * .25
    else:
        kept = [j for j in order if reward[j] > -0.25 and log_ref[j].sum() > -1.4]
    return [float(j in kept) / max(1, len(kept)) for j in range(len(reward))]


# One query, four samples. Sums of log pi: -3, -1 (padding holds -9), -4, -2; of log ref:
# -3, -3, -6, -2. Rewards (1, 0, 1, .5).
# Best of n: samples 1 and 3 tie: (3 + 4) / 2 = 3.5.
# RAFT, a quarter of four is one place, which the two share: 3.5. Three quarters: three places,
# 1, 3 and 4: (3 + 4 + 2) / 3 = 3. Half: 1 and 3.
# ReST, threshold 0 + (.8 - 0) * .5 = .4: samples 1, 3 and 4: 3; at progress 1, .8: 3.5; above 1: 0.
# MLE smoothing, reward > .4 and log ref > -5: samples 1 and 4: (3 + 2) / 2 = 2.5.
@pytest.mark.parametrize(
    ("objective", "settings", "loss"),
    [
        (_best, {}, 3.5),
        (_raft, {"share": 0.25}, 3.5),
        (_raft, {"share": 0.75}, 3.0),
        (_raft, {"share": 0.01}, 3.5),
        (_raft, {"share": 1.0}, 2.5),
        (_rest, {"start": 0.0, "end": 0.8, "progress": 0.5}, 3.0),
        (_rest, {"start": 0.0, "end": 0.8, "progress": 1.0}, 3.5),
        (_rest, {"start": 1.0, "end": 1.0, "progress": 0.0}, 0.0),
        (_mle, {"above": 0.4, "likely": -5.0}, 2.5),
    ],
)
def test_value_by_hand(objective, settings, loss):
    log_pi = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0], [-3.0, -1.0], [-1.0, -1.0]]])
    log_ref = torch.tensor([[[-2.0, -1.0], [-3.0, -5.0], [-3.0, -3.0], [-1.0, -1.0]]])
    mask = torch.ones_like(log_pi).bool()
    mask[0, 1, 1] = False
    reward = torch.tensor([[1.0, 0.0, 1.0, 0.5]])
    output = objective(log_pi, log_ref, mask, reward, **settings)
    assert output.loss.item() == pytest.approx(loss)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics["reward_mean"] == pytest.approx(0.625)
    # Deviations .375, -.625, .375, -.125: squares .140625 * 2 + .390625 + .015625 = .6875.
    assert metrics["reward_std"] == pytest.approx((0.6875 / 4) ** 0.5)
    assert metrics["equal_reward_share"] == 0
    if objective is _mle:
        assert metrics["kl"] == pytest.approx(1.0)  # (0 + 2 + 2 + 0) / 4
        assert metrics["kept_share"] == 0.5


@every_kind
def test_gradcheck(kind):
    log_pi, *rest_of_batch = _batch()
    assert torch.autograd.gradcheck(lambda x: _loss(kind, (x, *rest_of_batch)), log_pi)


@every_kind
def test_gradient_is_minus_the_weight_of_each_response(kind):
    _, log_ref, mask, reward = batch = _batch()
    weights = torch.tensor(
        [_kept(kind, *one) for one in zip(log_ref, reward.tolist(), strict=True)]
    ).double()
    assert 0 < (weights > 0).sum() < weights.numel()
    torch.testing.assert_close(_grad(kind, batch), -(weights.unsqueeze(-1) * mask) / 3)


def test_ties_at_the_border_weigh_as_the_mean_over_random_tie_breaking():
    # Two places, one taken by the first sample, one shared by the next three.
    log_pi, log_ref, mask, _ = _batch(queries=1)
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).double()
    found = _grad("raft", (log_pi, log_ref, mask, reward))
    share = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]).double().view(1, 4, 1)
    torch.testing.assert_close(found, -share * mask)


def test_raft_ranges_from_best_of_n_to_all_samples():
    batch = _batch()
    log_pi, _, mask, _ = batch
    torch.testing.assert_close(_raft(*batch, share=0.25).loss, _loss("best_of_n", batch))
    everything = -torch.where(mask, log_pi, 0.0).sum(-1).mean()
    torch.testing.assert_close(_raft(*batch, share=1.0).loss, everything)


def test_mle_smoothing_without_a_limit_on_the_reference_is_rest():
    batch = _batch()
    torch.testing.assert_close(_mle(*batch, likely=-1e9).loss, _loss("rest", batch))


def test_on_binary_rewards_best_of_n_and_rest_imitate_the_right_answers():
    log_pi, log_ref, mask, reward = _batch()
    batch = (log_pi, log_ref, mask, (reward > reward.mean(1, keepdim=True)).double())
    torch.testing.assert_close(_loss("best_of_n", batch), _rest(*batch, start=0.5, end=0.5).loss)


@pytest.mark.parametrize("kind", ["rest", "mle_smoothing"])
def test_a_query_of_which_nothing_is_kept_counts_as_zero(kind):
    batch = _batch(queries=2)
    batch[3][0], batch[3][1] = 1.0, -9.0
    first = tuple(part[:1].detach() for part in batch)
    torch.testing.assert_close(_loss(kind, batch), _loss(kind, first) / 2)
    gradient = _grad(kind, batch)
    assert gradient[0].abs().max() > 0
    assert gradient[1].abs().max() == 0


@pytest.mark.parametrize("kind", ["best_of_n", "raft"])
def test_a_constant_added_to_the_rewards_of_a_query_changes_nothing(kind):
    log_pi, log_ref, mask, reward = _batch()
    shifted = reward + torch.tensor([[7.0], [-3.0], [100.0]])
    torch.testing.assert_close(
        _grad(kind, (log_pi, log_ref, mask, reward)), _grad(kind, (log_pi, log_ref, mask, shifted))
    )


@every_kind
def test_order_of_samples_changes_nothing(kind):
    batch = _batch()
    batch[3].copy_(batch[3].round())  # ties
    moved = tuple(part[:, [2, 0, 3, 1]] for part in batch)
    torch.testing.assert_close(_loss(kind, batch), _loss(kind, moved))


@every_kind
def test_padding_changes_nothing_whatever_it_holds(kind):
    log_pi, log_ref, mask, reward = _batch()
    before = _grad(kind, (log_pi, log_ref, mask, reward))
    noise = torch.full_like(log_ref[..., :2], float("nan"))
    wide_pi, wide_ref = (
        torch.cat([part.detach().where(mask, float("inf")), noise], -1)
        for part in (log_pi, log_ref)
    )
    wide_mask = torch.cat([mask, torch.zeros_like(noise, dtype=torch.bool)], -1)
    after = _grad(kind, (wide_pi.requires_grad_(), wide_ref, wide_mask, reward))
    torch.testing.assert_close(after[..., :-2], before)
    assert (after[..., -2:] == 0).all()


@every_kind
def test_queries_do_not_mix(kind):
    batch = _batch()
    alone = [
        tuple(part[q : q + 1].detach().requires_grad_(part.requires_grad) for part in batch)
        for q in range(3)
    ]
    losses = torch.stack([_loss(kind, one) for one in alone])
    torch.testing.assert_close(_loss(kind, batch), losses.mean())
    torch.testing.assert_close(_grad(kind, batch), torch.cat([_grad(kind, o) for o in alone]) / 3)


@every_kind
def test_reference_reward_and_metrics_get_no_gradient(kind):
    log_pi, log_ref, mask, reward = _batch()
    log_ref.requires_grad_()
    reward.requires_grad_()
    output = FAMILY[kind](log_pi, log_ref, mask, reward)
    found = torch.autograd.grad(output.loss, (log_ref, reward), allow_unused=True)
    assert found == (None, None)
    assert not any(value.requires_grad for value in output.metrics.values())


@every_kind
def test_bfloat16_is_computed_in_float32(kind):
    log_pi, log_ref, mask, reward = (part.detach() for part in _batch())
    output = FAMILY[kind](log_pi.bfloat16(), log_ref.bfloat16(), mask, reward.bfloat16())
    assert {output.loss.dtype, *(v.dtype for v in output.metrics.values())} == {torch.float32}
