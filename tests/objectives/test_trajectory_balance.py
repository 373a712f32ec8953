import pytest
import torch
from tba.objectives.trajectory_balance import trajectory_balance

BETA = 0.3


def _batch(queries=3, samples=4, tokens=5, seed=0, dtype=torch.float64):
    """Ragged responses of several queries whose mean rewards differ."""
    generator = torch.Generator().manual_seed(seed)
    shape = (queries, samples, tokens)
    lengths = torch.randint(1, tokens + 1, shape[:2], generator=generator)
    mask = torch.arange(tokens) < lengths.unsqueeze(-1)
    log_pi, log_ref = (
        -torch.rand(shape, generator=generator, dtype=dtype).where(mask, 0.0) for _ in range(2)
    )
    reward = torch.randn(shape[:2], generator=generator, dtype=dtype)
    reward += 10.0 * torch.arange(queries).unsqueeze(-1)
    return log_pi.requires_grad_(), log_ref, mask, reward


def _grad(loss, log_pi):
    (gradient,) = torch.autograd.grad(loss, log_pi, retain_graph=True)
    return gradient


def _tb_grad(log_pi, log_ref, mask, reward, beta=BETA):
    return _grad(trajectory_balance(log_pi, log_ref, mask, reward, beta=beta).loss, log_pi)


def _sequence_sums(log_pi, log_ref, mask):
    return (log_pi * mask).sum(-1), (log_ref * mask).sum(-1)


def _paper_loss(log_pi, log_ref, mask, reward, *, detach):
    """Equation (5) as it stands, with the estimate (4)."""
    pi, ref = _sequence_sums(log_pi, log_ref, mask)
    log_z = (ref - pi + reward / BETA).mean(1, keepdim=True)
    log_z = log_z.detach() if detach else log_z
    return (log_z + pi - ref - reward / BETA).square().mean()


def test_value_by_hand():
    # One query, two samples, beta 1/2.
    # k_1 = (-1 + 2) + (-2 + 1) = 0 and k_2 = -1 + 3 = 2 (its second token is padding); r = (1, 0).
    # log Z^ = mean(-0 + 1 / .5, -2 + 0 / .5) = mean(2, -2) = 0.
    # Residuals: 0 + 0 - 2 = -2 and 0 + 2 - 0 = 2; L = (4 + 4) / 2 = 4; (beta / 2) L = 1.
    log_pi = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0]]])
    log_ref = torch.tensor([[[-2.0, -1.0], [-3.0, -5.0]]])
    mask = torch.tensor([[[True, True], [True, False]]])
    reward = torch.tensor([[1.0, 0.0]])
    output = trajectory_balance(log_pi, log_ref, mask, reward, beta=0.5)
    assert output.loss.item() == pytest.approx(1.0)
    expected = {
        "log_z": 0.0,
        "kl": 1.0,  # (0 + 2) / 2
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "equal_reward_share": 0.0,
        "advantage_abs_mean": 1.0,  # A = (.5 + .5, -.5 - .5) = -beta * residual
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected)


def test_gradcheck():
    # Finite differences see through the stop-gradient, and agree: it changes nothing.
    log_pi, log_ref, mask, reward = _batch()
    assert torch.autograd.gradcheck(
        lambda x: trajectory_balance(x, log_ref, mask, reward, beta=BETA).loss, log_pi
    )


@pytest.mark.parametrize("detach", [True, False], ids=["sg", "no sg"])
def test_loss_and_gradient_are_half_beta_times_the_papers_with_or_without_stop_gradient(detach):
    batch = _batch()
    paper = BETA / 2 * _paper_loss(*batch, detach=detach)
    output = trajectory_balance(*batch, beta=BETA)
    torch.testing.assert_close(output.loss, paper)
    torch.testing.assert_close(_grad(output.loss, batch[0]), _grad(paper, batch[0]))


def test_loss_is_the_variance_within_queries():
    log_pi, log_ref, mask, reward = _batch()
    pi, ref = _sequence_sums(log_pi, log_ref, mask)
    variance = (pi - ref - reward / BETA).var(dim=1, correction=0).mean()
    loss = trajectory_balance(log_pi, log_ref, mask, reward, beta=BETA).loss
    torch.testing.assert_close(loss, BETA / 2 * variance)


def test_gradient_is_minus_the_mean_of_advantage_times_grad_log_pi():
    log_pi, log_ref, mask, reward = _batch()
    pi, ref = (part.detach() for part in _sequence_sums(log_pi, log_ref, mask))
    k = pi - ref
    advantage = (reward - reward.mean(1, keepdim=True)) - BETA * (k - k.mean(1, keepdim=True))
    expected = -(advantage.unsqueeze(-1) * mask) / reward.numel()
    torch.testing.assert_close(_tb_grad(log_pi, log_ref, mask, reward), expected)


def test_on_policy_it_is_reinforce_with_a_mean_baseline_and_k_minus_1_over_k_times_rloo():
    log_pi, log_ref, mask, reward = _batch()
    pi, ref = _sequence_sums(log_pi, log_ref, mask)
    samples = reward.shape[1]
    total = reward - BETA * (pi - ref).detach()  # KL in the reward
    reinforce = -((total - total.mean(1, keepdim=True)) * pi).mean()
    others = (total.sum(1, keepdim=True) - total) / (samples - 1)
    rloo = -((total - others) * pi).mean()
    found = _tb_grad(log_pi, log_ref, mask, reward)
    torch.testing.assert_close(found, _grad(reinforce, log_pi))
    torch.testing.assert_close(found, (samples - 1) / samples * _grad(rloo, log_pi))


def test_a_constant_added_to_the_rewards_of_a_query_changes_nothing():
    log_pi, log_ref, mask, reward = _batch()
    shifted = reward + torch.tensor([[7.0], [-3.0], [100.0]])
    before = trajectory_balance(log_pi, log_ref, mask, reward, beta=BETA).loss
    after = trajectory_balance(log_pi, log_ref, mask, shifted, beta=BETA).loss
    torch.testing.assert_close(before, after)


def test_loss_and_log_z_are_invariant_to_the_order_of_samples():
    batch = _batch()
    order = [2, 0, 3, 1]
    before = trajectory_balance(*batch, beta=BETA)
    after = trajectory_balance(*(part[:, order] for part in batch), beta=BETA)
    torch.testing.assert_close(before.loss, after.loss)
    torch.testing.assert_close(before.metrics["log_z"], after.metrics["log_z"])


def test_padding_changes_nothing_whatever_it_holds():
    log_pi, log_ref, mask, reward = _batch()
    before = _tb_grad(log_pi, log_ref, mask, reward)
    noise = torch.full_like(log_ref[..., :2], float("nan"))
    wide_pi, wide_ref = (
        torch.cat([part.detach().where(mask, float("inf")), noise], -1)
        for part in (log_pi, log_ref)
    )
    wide_mask = torch.cat([mask, torch.zeros_like(noise, dtype=torch.bool)], -1)
    after = _tb_grad(wide_pi.requires_grad_(), wide_ref, wide_mask, reward)
    torch.testing.assert_close(after[..., :-2], before)
    assert (after[..., -2:] == 0).all()


def test_queries_do_not_mix():
    batch = _batch()
    whole = _tb_grad(*batch)
    for query in range(3):
        alone = [part[query : query + 1].detach() for part in batch]
        alone[0].requires_grad_()
        torch.testing.assert_close(_tb_grad(*alone) / 3, whole[query : query + 1])


def test_equal_rewards_still_give_the_kl_gradient():
    log_pi, log_ref, mask, reward = _batch()
    equal = torch.ones_like(reward)
    pi, ref = _sequence_sums(log_pi, log_ref, mask)
    k = (pi - ref).detach()
    kl_only = (BETA * (k - k.mean(1, keepdim=True)) * pi).mean()
    found = _tb_grad(log_pi, log_ref, mask, equal)
    torch.testing.assert_close(found, _grad(kl_only, log_pi))
    assert found.abs().max() > 0
    metrics = trajectory_balance(log_pi, log_ref, mask, equal, beta=BETA).metrics
    assert metrics["equal_reward_share"] == 1


def test_reference_reward_and_metrics_get_no_gradient():
    log_pi, log_ref, mask, reward = _batch()
    log_ref.requires_grad_()
    reward.requires_grad_()
    output = trajectory_balance(log_pi, log_ref, mask, reward, beta=BETA)
    found = torch.autograd.grad(output.loss, (log_ref, reward), allow_unused=True)
    assert found == (None, None)
    assert not any(value.requires_grad for value in output.metrics.values())


def test_one_sample_gives_no_gradient():
    assert _tb_grad(*_batch(samples=1)).abs().max() == 0


def test_the_optimum_has_zero_loss():
    # pi proportional to ref exp(r / beta): log pi - log ref - r / beta is the same for all samples.
    _, log_ref, mask, reward = _batch(tokens=1)
    log_pi = log_ref + reward.unsqueeze(-1) / BETA - 4.0
    output = trajectory_balance(log_pi, log_ref, mask, reward, beta=BETA)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-20)
    assert output.metrics["log_z"].item() == pytest.approx(4.0)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 1.0])
def test_float32_gradient_is_accurate_for_any_beta(beta):
    exact = _tb_grad(*_batch(), beta=beta)
    log_pi, log_ref, mask, reward = (part.detach() for part in _batch())
    rough = _tb_grad(
        log_pi.float().requires_grad_(), log_ref.float(), mask, reward.float(), beta=beta
    )
    torch.testing.assert_close(rough.double(), exact, rtol=1e-5, atol=1e-7)


def test_bfloat16_is_computed_in_float32():
    log_pi, log_ref, mask, reward = (part.detach() for part in _batch())
    output = trajectory_balance(
        log_pi.bfloat16(), log_ref.bfloat16(), mask, reward.float(), beta=BETA
    )
    assert output.loss.dtype == torch.float32
