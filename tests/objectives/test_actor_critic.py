import math

import pytest
import torch

from ratio_objectives import batch, grad
from tba.objectives.actor_critic import a3c, vtrace, vtrace_targets
from tba.objectives.policy_gradient import reinforce
from tba.objectives.returns import token_rewards

SETTINGS = {"beta": 0.3, "discount": 0.9, "rho_bar": 1.1, "c_bar": 1.0, "value_coefficient": 0.5}


def _t(*values):
    return torch.tensor([values], dtype=torch.float64)


def _vtrace(inputs, **changes):
    names = ("log_pi", "log_mu", "log_ref", "mask", "reward", "value")
    return vtrace(*(inputs[name] for name in names), **SETTINGS | changes)


def _a3c(inputs, **changes):
    names = ("log_pi", "log_ref", "mask", "reward", "value")
    settings = {"beta": 0.3, "discount": 0.9, "value_coefficient": 0.5}
    return a3c(*(inputs[name] for name in names), **settings | changes)


def _targets(inputs, **changes):
    ratio = (inputs["log_pi"] - inputs["log_mu"]).exp()
    mask, value = inputs["mask"], inputs["value"]
    reward = token_rewards(inputs["log_mu"] - inputs["log_ref"], mask, inputs["reward"], 0.3)
    settings = {"discount": 0.9, "rho_bar": 1.1, "c_bar": 1.0} | changes
    return vtrace_targets(ratio, reward, value, mask, **settings), ratio.detach(), reward


def test_vtrace_by_hand():
    # One response of two tokens.  rho = (2, 1/2), rho_bar 3/2, c_bar 1, gamma 1/2; V = (1, 2).
    # k = log mu - log ref = (1, 0), beta 1, r = 4: token rewards (-1, 4).
    # delta_1 = .5 (4 - 2) = 1; v_1 = 3.
    # delta_0 = 1.5 (-1 + 2 / 2 - 1) = -1.5; v_0 = 1 - 1.5 + .5 * 1 * (3 - 2) = 0.
    # A_1 = .5 (4 - 2) = 1; A_0 = 1.5 (-1 + 3 / 2 - 1) = -.75.
    # log pi = (-1, -2): policy -(-.75 * -1 + 1 * -2) = 1.25; values .5 (1 + 1) = 1, times 1/2.
    log_pi = _t([-1.0, -2.0])
    log_mu = log_pi - _t([math.log(2), math.log(0.5)])
    log_ref = log_mu - _t([1.0, 0.0])
    output = vtrace(
        log_pi,
        log_mu,
        log_ref,
        torch.ones(1, 1, 2, dtype=torch.bool),
        _t(4.0),
        _t([1.0, 2.0]),
        beta=1.0,
        discount=0.5,
        rho_bar=1.5,
        c_bar=1.0,
        value_coefficient=0.5,
    )
    assert output.loss.item() == pytest.approx(1.75)
    expected = {
        "reward_mean": 4.0,
        "reward_std": 0.0,
        "equal_reward_share": 1.0,
        "kl": 1.0,  # the two log-ratios to mu cancel
        "ratio_mean": 1.25,
        "clipped_share": 0.5,
        "value_loss": 0.5,
    }
    assert {k: v.item() for k, v in output.metrics.items()} == pytest.approx(expected)


def test_a3c_by_hand():
    # k = (1, 0), beta 1, r = 4, gamma 1/2: token rewards (-1, 4); R = (1, 4); V = (3, 2).
    # R - V = (-2, 2): policy -(-2 * -1 + 2 * -2) = 2; values .5 (4 + 4) = 4, times 1/2.
    log_pi = _t([-1.0, -2.0])
    output = a3c(
        log_pi,
        log_pi - _t([1.0, 0.0]),
        torch.ones(1, 1, 2, dtype=torch.bool),
        _t(4.0),
        _t([3.0, 2.0]),
        beta=1.0,
        discount=0.5,
        value_coefficient=0.5,
    )
    assert output.loss.item() == pytest.approx(4.0)
    assert output.metrics["value_loss"].item() == pytest.approx(2.0)
    assert output.metrics["kl"].item() == pytest.approx(1.0)


def test_targets_are_those_of_rlax_on_its_test_s_numbers():
    # Inputs and results of rlax's vtrace_test.py.  Its bootstrap value V_4 is a fifth token here,
    # whose reward is its value and whose discount is 0.
    mu = _t([[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]])
    mu = torch.cat([mu, _t([[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]])], dim=1)
    pi = _t([[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]])
    pi = torch.cat([pi, _t([[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]])], dim=1)
    action = torch.tensor([[[0, 1, 0, 0], [1, 0, 0, 1]]]).unsqueeze(-1)
    log_rho = (pi.log_softmax(-1) - mu.log_softmax(-1)).gather(-1, action).squeeze(-1)
    ratio = torch.cat([log_rho.exp(), _t([1.0], [1.0])], dim=-1)
    reward = _t([-1.3, -1.3, 2.3, 42.0, 8.4], [1.3, 5.3, -3.3, -5.0, -1.2])
    discount = _t([0.0, 0.89, 0.85, 0.99, 0.0], [0.88, 1.0, 0.83, 0.95, 0.0])
    value = _t([2.1, 1.1, -3.1, 0.0, 8.4], [3.1, 0.1, -1.1, 7.4, -1.2])
    target, advantage = vtrace_targets(
        ratio,
        reward,
        value,
        torch.ones_like(value, dtype=torch.bool),
        discount=discount,
        rho_bar=1.0,
        c_bar=1.0,
    )
    error = _t(
        [-1.6155143, -3.4973226, 1.8670533, 50.316002],
        [1.4662437, 3.6116405, -8.3327293e-5, -13.54],
    )
    torch.testing.assert_close((target - value)[..., :4], error, rtol=1e-3, atol=0)
    torch.testing.assert_close(advantage[..., :4], error, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (1.2, 0.9), (1e9, 1e9)])
def test_targets_are_impala_s_sum_over_products(rho_bar, c_bar):
    # v_s = V_s + sum_{t >= s} gamma^(t - s) (prod_{i = s}^{t - 1} c_i) delta_t, as in the paper.
    inputs = batch()
    (target, advantage), ratio, reward = _targets(inputs, rho_bar=rho_bar, c_bar=c_bar)
    for query, sample in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        n = int(inputs["mask"][query, sample].sum())
        rho = ratio[query, sample, :n].tolist()
        r = reward[query, sample, :n].tolist()
        v = [*inputs["value"][query, sample, :n].tolist(), 0.0]
        delta = [min(rho_bar, rho[t]) * (r[t] + 0.9 * v[t + 1] - v[t]) for t in range(n)]
        expected = [0.0] * n + [0.0]
        for s in range(n):
            expected[s] = v[s] + sum(
                0.9 ** (t - s) * math.prod(min(c_bar, c) for c in rho[s:t]) * delta[t]
                for t in range(s, n)
            )
        assert target[query, sample, :n].tolist() == pytest.approx(expected[:n])
        expected_advantage = [
            min(rho_bar, rho[t]) * (r[t] + 0.9 * expected[t + 1] - v[t]) for t in range(n)
        ]
        assert advantage[query, sample, :n].tolist() == pytest.approx(expected_advantage)


def test_targets_carry_no_gradient():
    (target, advantage), _, _ = _targets(batch())
    assert not target.requires_grad
    assert not advantage.requires_grad


def test_gradients_are_minus_the_advantage_and_the_error_of_the_value():
    # Finite differences see through the stop-gradients; so the closed forms instead.
    inputs = batch()
    (target, advantage), _, _ = _targets(inputs)
    loss = _vtrace(inputs).loss
    torch.testing.assert_close(grad(loss, inputs["log_pi"]), -advantage / 12)
    error = target - inputs["value"].detach()
    torch.testing.assert_close(grad(loss, inputs["value"]), -0.5 * error / 12)


def test_a3c_s_gradients_are_minus_the_return_less_the_value():
    inputs = batch()
    mask, value = inputs["mask"], inputs["value"].detach()
    log_k = (inputs["log_pi"] - inputs["log_ref"]).detach()
    reward = token_rewards(log_k, mask, inputs["reward"], 0.3)
    powers = 0.9 ** torch.arange(5, dtype=torch.float64)
    returns = torch.stack([(reward[..., t:] * powers[: 5 - t]).sum(-1) for t in range(5)], dim=-1)
    error = (returns - value).where(mask, 0.0)
    loss = _a3c(inputs).loss
    torch.testing.assert_close(grad(loss, inputs["log_pi"]), -error / 12)
    torch.testing.assert_close(grad(loss, inputs["value"]), -0.5 * error / 12)


def test_on_policy_vtrace_with_caps_of_one_is_a3c():
    # At ratio 1 the sum of errors telescopes to the return less the value.
    inputs = batch()
    inputs["log_mu"] = inputs["log_pi"].detach()
    ours, theirs = _vtrace(inputs, rho_bar=1.0), _a3c(inputs)
    torch.testing.assert_close(ours.loss, theirs.loss)
    for name in ("log_pi", "value"):
        torch.testing.assert_close(grad(ours.loss, inputs[name]), grad(theirs.loss, inputs[name]))


def test_a3c_without_critic_discount_and_kl_is_reinforce_without_baseline():
    inputs = batch() | {"value": torch.zeros(3, 4, 5, dtype=torch.float64)}
    log_pi = inputs["log_pi"]
    names = ("log_pi", "log_mu", "log_ref", "mask", "reward")
    zero = torch.zeros((), dtype=torch.float64)
    plain = reinforce(*(inputs[name] for name in names), zero, beta=0.0)
    found = _a3c(inputs, beta=0.0, discount=1.0)
    torch.testing.assert_close(grad(found.loss, log_pi), grad(plain.loss, log_pi))


def test_a_policy_that_left_the_samples_behind_learns_nothing_from_them():
    inputs = batch()
    gone = inputs | {"log_mu": inputs["log_mu"] + 50.0}  # rho is e^-50
    loss = _vtrace(gone).loss
    assert grad(loss, inputs["log_pi"]).abs().max() < 1e-18
    assert grad(loss, inputs["value"]).abs().max() < 1e-18
