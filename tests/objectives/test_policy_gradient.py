import math

import pytest
import torch

from ratio_objectives import batch, grad
from tba.objectives.policy_gradient import asymre, reinforce, rloo, rloo_proximal, topr
from tba.objectives.trajectory_balance import trajectory_balance

FORM = torch.tensor([[[True, True], [True, False]]])


def _t(*values):
    return torch.tensor([values], dtype=torch.float64)


def _by_hand(sequence_ratios=(1.0, 1.0)):
    """log pi(y) = -3 and -5, KL of the sampler 1 and -1, r = (3, 1)."""
    log_pi = _t([-1.0, -2.0], [-5.0, 7.0])
    log_mu = log_pi - _t([math.log(sequence_ratios[0]), 0.0], [math.log(sequence_ratios[1]), 0.0])
    log_ref = log_mu - _t([0.25, 0.75], [-1.0, 7.0])
    return log_pi, log_mu, log_ref, FORM, _t(3.0, 1.0)


def _inputs(inputs, *names):
    return [inputs[name] for name in ("log_pi", *names, "mask", "reward")]


def test_reinforce_by_hand():
    # beta 1/2: R = (3 - .5, 1 + .5) = (2.5, 1.5); b = 1: (1.5, .5); -(1.5 * -3 + .5 * -5) / 2.
    output = reinforce(*_by_hand(), torch.tensor(1.0, dtype=torch.float64), beta=0.5)
    assert output.loss.item() == pytest.approx(3.5)
    assert output.metrics["kl"].item() == pytest.approx(0.0)  # (1 - 1) / 2
    assert output.metrics["reward_mean"].item() == 2.0


def test_rloo_by_hand():
    # A = (2.5 - 1.5, 1.5 - 2.5) = (1, -1); -(-3 + 5) / 2.
    assert rloo(*_by_hand(), beta=0.5).loss.item() == pytest.approx(-1.0)


def test_rloo_proximal_by_hand():
    # Ratios of the responses (1.5, .5), A = (1, -1): 1.2 and -.8; -(.4) / 2.
    output = rloo_proximal(*_by_hand((1.5, 0.5)), beta=0.5, clip_range=0.2)
    assert output.loss.item() == pytest.approx(-0.2)
    assert output.metrics["clipped_share"].item() == 1.0
    assert output.metrics["ratio_mean"].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ratio", "loss", "share"),
    [
        (0.5, 0.25, 0.0),  # R = (1, -1), weights 1 and .5: -(-3 + .5 * 5) / 2
        (4.0, -1.0, 0.5),  # weight 1: -(-3 + 5) / 2
    ],
)
def test_topr_by_hand(ratio, loss, share):
    log_pi, log_mu, _, mask, reward = _by_hand((9.0, ratio))
    output = topr(log_pi, log_mu, mask, reward, baseline=2.0)
    assert output.loss.item() == pytest.approx(loss)
    assert output.metrics["clipped_share"].item() == share
    assert output.metrics["ratio_mean"].item() == pytest.approx((9 + ratio) / 2)


def test_asymre_by_hand():
    # V = 2 - .5: (1.5, -.5); -(1.5 * -3 - .5 * -5) / 2.
    log_pi, _, _, mask, reward = _by_hand()
    assert asymre(log_pi, mask, reward, delta=0.5).loss.item() == pytest.approx(1.0)


def test_topr_s_gradient_is_weight_times_reward():
    # Finite differences see through the stop-gradient on the weight; so the closed form instead.
    inputs = batch()
    log_pi, log_mu, mask, reward = _inputs(inputs, "log_mu")
    found = grad(topr(log_pi, log_mu, mask, reward, baseline=10.0).loss, log_pi)
    rho = (log_pi - log_mu).detach().sum(-1).exp()
    weights = [
        [1.0 if r >= 10 else min(ratio, 1.0) for r, ratio in zip(rs, ratios, strict=True)]
        for rs, ratios in zip(reward.tolist(), rho.tolist(), strict=True)
    ]
    weight = torch.tensor(weights, dtype=torch.float64)
    assert 0 < (weight < 1).sum() < (reward < 10).sum()
    expected = -(weight * (reward - 10)).unsqueeze(-1) * mask / 12
    torch.testing.assert_close(found, expected)


def test_topr_moves_with_reward_and_baseline_together():
    log_pi, log_mu, mask, reward = _inputs(batch(), "log_mu")
    torch.testing.assert_close(
        topr(log_pi, log_mu, mask, reward, baseline=1.0).loss,
        topr(log_pi, log_mu, mask, reward + 5, baseline=6.0).loss,
    )


def test_topr_on_rewards_above_the_baseline_is_supervised_learning():
    # No ratio: what the sampler thought of them does not matter.
    log_pi, log_mu, mask, reward = _inputs(batch(), "log_mu")
    found = topr(log_pi, log_mu - 3.0, mask, torch.ones_like(reward), baseline=0.0).loss
    torch.testing.assert_close(found, -log_pi.sum(-1).mean())


def test_rloo_is_k_over_k_minus_1_times_the_mean_baseline():
    inputs = batch(queries=1)  # one query: the batch's mean reward is the query's
    arguments = _inputs(inputs, "log_mu", "log_ref")
    mean_kl = (inputs["log_mu"] - inputs["log_ref"]).sum(-1).mean()
    baseline = inputs["mean_reward"] - 0.3 * mean_kl
    centred = grad(reinforce(*arguments, baseline, beta=0.3).loss, inputs["log_pi"])
    found = grad(rloo(*arguments, beta=0.3).loss, inputs["log_pi"])
    torch.testing.assert_close(found, 4 / 3 * centred)


def test_on_policy_rloo_is_k_over_k_minus_1_times_trajectory_balance():
    # The identity of section 1 of docs/algorithm.md: TB's gradient is (K - 1) / K of RLOO's.
    inputs = batch()
    log_pi = inputs["log_pi"]
    inputs["log_mu"] = log_pi.detach()
    tb = trajectory_balance(*_inputs(inputs, "log_ref"), beta=0.3)
    found = rloo(*_inputs(inputs, "log_mu", "log_ref"), beta=0.3)
    torch.testing.assert_close(grad(tb.loss, log_pi), 3 / 4 * grad(found.loss, log_pi))


def test_off_policy_rloo_s_kl_does_not_see_the_policy_being_trained():
    inputs = batch()
    before = grad(rloo(*_inputs(inputs, "log_mu", "log_ref"), beta=0.3).loss, inputs["log_pi"])
    moved = (inputs["log_pi"].detach() - inputs["mask"].double()).requires_grad_()
    arguments = _inputs(inputs | {"log_pi": moved}, "log_mu", "log_ref")
    torch.testing.assert_close(grad(rloo(*arguments, beta=0.3).loss, moved), before)


def test_rloo_proximal_is_rloo_at_ratio_one_and_differs_off_policy():
    inputs = batch()
    arguments = _inputs(inputs, "log_mu", "log_ref")
    log_pi = inputs["log_pi"]
    proximal = rloo_proximal(*arguments, beta=0.3, clip_range=0.2)
    assert not torch.allclose(
        grad(proximal.loss, log_pi), grad(rloo(*arguments, beta=0.3).loss, log_pi)
    )
    arguments[1] = log_pi.detach()
    proximal = rloo_proximal(*arguments, beta=0.3, clip_range=0.2)
    torch.testing.assert_close(
        grad(proximal.loss, log_pi), grad(rloo(*arguments, beta=0.3).loss, log_pi)
    )


def test_asymre_adds_delta_times_supervised_learning_to_the_mean_baseline():
    log_pi, mask, reward = _inputs(batch())
    centred = asymre(log_pi, mask, reward, delta=0.0).loss
    found = asymre(log_pi, mask, reward, delta=0.1).loss
    torch.testing.assert_close(found, centred - 0.1 * log_pi.sum(-1).mean())
