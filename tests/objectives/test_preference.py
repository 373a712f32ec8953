import pytest
import torch

from tba.objectives.preference import dpo, ipo, online_dpo
from trl_pairs import trl_loss_of_pairs

BETA = 0.3
FAMILY = {"online_dpo": online_dpo, "dpo": dpo, "ipo": ipo}
every_kind = pytest.mark.parametrize("kind", FAMILY)


def _batch(queries=3, samples=4, tokens=5, seed=0):
    """Ragged responses of several queries whose mean rewards differ."""
    generator = torch.Generator().manual_seed(seed)
    shape = (queries, samples, tokens)
    lengths = torch.randint(1, tokens + 1, shape[:2], generator=generator)
    mask = torch.arange(tokens) < lengths.unsqueeze(-1)
    log_pi, log_ref = (
        -torch.rand(shape, generator=generator, dtype=torch.float64).where(mask, 0.0)
        for _ in range(2)
    )
    reward = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
    reward += 10.0 * torch.arange(queries).unsqueeze(-1)
    return log_pi.requires_grad_(), log_ref, mask, reward


def _loss(kind, batch, beta=BETA):
    return FAMILY[kind](*batch, beta=beta).loss


def _grad(kind, batch, beta=BETA):
    return torch.autograd.grad(_loss(kind, batch, beta), batch[0])[0]


def _by_loops(kind, log_pi, log_ref, mask, reward):
    """The loss written as loops over queries and pairs."""
    losses = []
    for pi, ref, real, scores in zip(log_pi, log_ref, mask, reward, strict=True):
        k = [(p[m] - r[m]).sum() for p, r, m in zip(pi, ref, real, strict=True)]
        order = scores.tolist()
        pairs = [(i, j) for i, a in enumerate(order) for j, b in enumerate(order) if a > b]
        if kind == "online_dpo" and pairs:
            pairs = [(order.index(max(order)), order.index(min(order)))]
        terms = [
            (k[i] - k[j] - 1 / (2 * BETA)) ** 2
            if kind == "ipo"
            else torch.log1p(torch.exp(-BETA * (k[i] - k[j])))
            for i, j in pairs
        ]
        losses.append(torch.stack(terms).mean() if terms else torch.tensor(0.0).double())
    return torch.stack(losses).mean()


# One query, three samples, beta 1/2; k = (0, 2, -1), where the padding holds -9 and -5.
# Rewards (1, 0, 0): pairs (1, 2) with h = 0 - 2 = -2 and (1, 3) with h = 0 + 1 = 1.
# Online DPO: best is 1, worst the first of the equal ones, 2: ln(1 + e^{1}) = 1.3132617.
# DPO: mean(ln(1 + e^1), ln(1 + e^{-.5})) = (1.3132617 + 0.4740770) / 2 = 0.8936693.
# IPO: 1 / (2 beta) = 1; mean((-2 - 1)^2, (1 - 1)^2) = 4.5.
@pytest.mark.parametrize(
    ("kind", "loss", "accuracy"),
    [("online_dpo", 1.3132617, 0.0), ("dpo", 0.8936693, 0.5), ("ipo", 4.5, 0.5)],
)
def test_value_by_hand(kind, loss, accuracy):
    log_pi = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0], [-2.0, -1.0]]])
    log_ref = torch.tensor([[[-2.0, -1.0], [-3.0, -5.0], [-1.0, -1.0]]])
    mask = torch.tensor([[[True, True], [True, False], [True, True]]])
    output = FAMILY[kind](log_pi, log_ref, mask, torch.tensor([[1.0, 0.0, 0.0]]), beta=0.5)
    assert output.loss.item() == pytest.approx(loss)
    expected = {
        "kl": 1 / 3,  # (0 + 2 - 1) / 3
        "reward_mean": 1 / 3,
        "reward_std": (2 / 9) ** 0.5,  # 1/3 - 1/9
        "equal_reward_share": 0.0,
        "pair_accuracy": accuracy,  # one of h > 0, of one or two pairs
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected)


@every_kind
def test_gradcheck(kind):
    log_pi, *rest = _batch()
    assert torch.autograd.gradcheck(lambda x: _loss(kind, (x, *rest)), log_pi)


@every_kind
@pytest.mark.parametrize("ties", [False, True])
def test_loss_and_gradient_agree_with_loops_over_pairs(kind, ties):
    batch = _batch(samples=5)
    if ties:
        batch[3].copy_((batch[3] > batch[3].mean(1, keepdim=True)).double())
    expected = _by_loops(kind, *batch)
    torch.testing.assert_close(_loss(kind, batch), expected)
    torch.testing.assert_close(_grad(kind, batch), torch.autograd.grad(expected, batch[0])[0])


def test_with_two_samples_online_dpo_is_dpo():
    batch = _batch(samples=2)
    torch.testing.assert_close(_loss("online_dpo", batch), _loss("dpo", batch))
    torch.testing.assert_close(_grad("online_dpo", batch), _grad("dpo", batch))


def test_gradient_of_dpo_is_weighted_by_how_wrong_the_pair_is():
    # 2305.18290, section 4: -beta sigmoid(-beta h) [grad log pi(better) - grad log pi(worse)].
    log_pi, log_ref, mask, _ = _batch(queries=1, samples=2)
    k = torch.where(mask, log_pi - log_ref, 0.0).sum(-1).detach()
    weight = BETA * torch.sigmoid(-BETA * (k[0, 0] - k[0, 1]))
    expected = weight * torch.tensor([-1.0, 1.0]).double().view(1, 2, 1) * mask
    found = _grad("dpo", (log_pi, log_ref, mask, torch.tensor([[1.0, 0.0]]).double()))
    torch.testing.assert_close(found, expected)


@every_kind
def test_only_the_order_of_rewards_matters(kind):
    log_pi, log_ref, mask, reward = _batch()
    other = torch.exp(reward / 10) + torch.tensor([[7.0], [-3.0], [100.0]])
    torch.testing.assert_close(
        _grad(kind, (log_pi, log_ref, mask, reward)), _grad(kind, (log_pi, log_ref, mask, other))
    )


@every_kind
def test_a_log_ratio_common_to_all_samples_of_a_query_changes_nothing(kind):
    # log Z(x) cancels in a pair; 2305.18290, equation (7). Every first token is a real one.
    log_pi, log_ref, mask, reward = _batch()
    moved = log_ref.clone()
    moved[..., 0] += torch.tensor([[1.0], [-2.0], [3.0]])
    torch.testing.assert_close(
        _loss(kind, (log_pi, log_ref, mask, reward)), _loss(kind, (log_pi, moved, mask, reward))
    )


@every_kind
def test_a_query_of_equal_rewards_counts_as_zero(kind):
    batch = _batch(queries=2)
    batch[3][1] = 0.5
    first = tuple(part[:1].detach() for part in batch)
    torch.testing.assert_close(_loss(kind, batch), _loss(kind, first) / 2)
    gradient = _grad(kind, batch)
    assert gradient[0].abs().max() > 0
    assert gradient[1].abs().max() == 0
    metrics = FAMILY[kind](*batch, beta=BETA).metrics
    assert metrics["equal_reward_share"] == 0.5
    assert metrics["pair_accuracy"] <= 0.5


@every_kind
def test_order_of_samples_changes_nothing(kind):
    batch = _batch()
    order = [2, 0, 3, 1]
    moved = tuple(part[:, order] for part in batch)
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
    whole, loss = _grad(kind, batch), _loss(kind, batch)
    alone = [
        tuple(part[q : q + 1].detach().requires_grad_(part.requires_grad) for part in batch)
        for q in range(3)
    ]
    torch.testing.assert_close(loss, torch.stack([_loss(kind, one) for one in alone]).mean())
    torch.testing.assert_close(whole, torch.cat([_grad(kind, one) for one in alone]) / 3)


@every_kind
def test_reference_reward_and_metrics_get_no_gradient(kind):
    log_pi, log_ref, mask, reward = _batch()
    log_ref.requires_grad_()
    reward.requires_grad_()
    output = FAMILY[kind](log_pi, log_ref, mask, reward, beta=BETA)
    found = torch.autograd.grad(output.loss, (log_ref, reward), allow_unused=True)
    assert found == (None, None)
    assert not any(value.requires_grad for value in output.metrics.values())


@every_kind
def test_bfloat16_is_computed_in_float32(kind):
    log_pi, log_ref, mask, reward = (part.detach() for part in _batch())
    output = FAMILY[kind](log_pi.bfloat16(), log_ref.bfloat16(), mask, reward.bfloat16(), beta=BETA)
    assert {output.loss.dtype, *(v.dtype for v in output.metrics.values())} == {torch.float32}


def test_dpo_is_finite_for_a_pair_that_is_wrong_beyond_all_measure():
    log_pi = torch.tensor([[[-1e4], [-1.0]]], requires_grad=True)
    batch = (log_pi, torch.full((1, 2, 1), -1.0), torch.ones(1, 2, 1).bool(), torch.eye(2)[:1])
    torch.testing.assert_close(_loss("dpo", batch, 1.0), torch.tensor(9999.0))
    torch.testing.assert_close(_grad("dpo", batch, 1.0).flatten(), torch.tensor([-1.0, 1.0]))


@pytest.mark.filterwarnings("default")  # importing trl warns
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_given_pairs_agree_with_trl(loss_type):
    log_pi, log_ref, mask, _ = _batch(samples=2)
    reward = torch.tensor([[1.0, 0.0]] * 3)
    tokens = log_pi.shape[-1]
    if loss_type == "ipo":  # TRL takes means over tokens
        mask = torch.ones_like(mask)
    trl_loss = trl_loss_of_pairs(loss_type, log_pi, log_ref, mask, BETA)
    if loss_type == "sigmoid":
        expected = _loss("dpo", (log_pi, log_ref, mask, reward))
    else:  # (h/T - 1/(2 beta))^2 = (h - 1/(2 beta/T))^2 / T^2
        expected = _loss("ipo", (log_pi, log_ref, mask, reward), BETA / tokens) / tokens**2
    torch.testing.assert_close(trl_loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, log_pi)[0] for x in (trl_loss, expected)), rtol=1e-5, atol=1e-5
    )
