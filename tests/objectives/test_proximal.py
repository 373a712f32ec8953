import math

import pytest
import torch

from ratio_objectives import batch, grad, hand
from tba.objectives.proximal import ppo, ppo_targets, vineppo
from tba.objectives.returns import generalised_advantage, token_rewards

SETTINGS = {"clip_range": 0.2, "value_clip_range": 0.2, "value_coefficient": 0.1}
TARGETS = {"beta": 0.3, "discount": 0.9, "gae_lambda": 0.95}


def _t(*values):
    return torch.tensor([values], dtype=torch.float64)


def _targets(inputs, **changes):
    names = ("value", "log_mu", "log_ref", "mask", "reward")
    return ppo_targets(*(inputs[name] for name in names), **TARGETS | changes)


def _ppo(inputs, targets, **changes):
    names = ("log_pi", "log_mu", "mask", "reward", "value")
    return ppo(*(inputs[name] for name in names), **targets, **SETTINGS | changes)


def test_targets_by_hand():
    # beta 1, gamma 1, lambda 1/2.  Sample 1: k = (1, 0), r = 3: token rewards (-1, 3), V = (2, 1).
    # delta = (-1 + 1 - 2, 3 - 1) = (-2, 2); A = (-2 + 2 / 2, 2) = (-1, 2); G = (1, 3).
    # Sample 2: k = -1, r = 1: token reward 2, V = 0: A = 2, G = 2.
    # Whitened: mean 1, variance (4 + 1 + 1) / 2 = 3.
    mask = torch.tensor([[[True, True], [True, False]]])
    log_mu = _t([1.0, 0.0], [-1.0, 9.0])
    value = _t([2.0, 1.0], [0.0, 9.0])
    found = ppo_targets(
        value,
        log_mu,
        torch.zeros_like(log_mu),
        mask,
        _t(3.0, 1.0),
        beta=1.0,
        discount=1.0,
        gae_lambda=0.5,
    )
    root = math.sqrt(3 + 1e-8)
    torch.testing.assert_close(
        found["advantage"], _t([-2 / root, 1 / root], [1 / root, 0.0]), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(found["value_target"], _t([1.0, 3.0], [2.0, 0.0]))
    torch.testing.assert_close(found["value_old"], value.where(mask, 0.0))


def test_ppo_by_hand():
    # Ratios (1.5, .5) and .5; A = (2, 1), -1: -(2.4 + .5 - .8) = -2.1.
    # V = (1, 0), 3; old (0, 0), 3; target (0, 1), 1.
    # Errors: max(1, (.2 - 0)^2) = 1; max(1, 1) = 1; max(4, 4) = 4; halved: 3.
    # (-2.1 + .1 * 3) / 3
    log_pi, log_mu, mask, reward = hand()
    output = ppo(
        log_pi,
        log_mu,
        mask,
        reward,
        _t([1.0, 0.0], [3.0, 9.0]),
        advantage=_t([2.0, 1.0], [-1.0, 9.0]),
        value_target=_t([0.0, 1.0], [1.0, 9.0]),
        value_old=_t([0.0, 0.0], [3.0, 9.0]),
        **SETTINGS,
    )
    assert output.loss.item() == pytest.approx(-0.6)
    assert output.metrics["value_loss"].item() == pytest.approx(1.0)
    assert output.metrics["clipped_share"].item() == pytest.approx(2 / 3)
    assert output.metrics["ratio_mean"].item() == pytest.approx(2.5 / 3)


def test_vineppo_by_hand():
    # The same policy terms, and k3 = log 2 - 1/2 at sample 2 alone.
    log_pi, log_mu, mask, reward = hand()
    log_ref = log_pi.clone()
    log_ref[0, 1, 0] -= math.log(2)
    output = vineppo(
        log_pi,
        log_mu,
        log_ref,
        mask,
        reward,
        _t([2.0, 1.0], [-1.0, 9.0]),
        clip_range=0.2,
        kl_coefficient=0.3,
    )
    assert output.loss.item() == pytest.approx((-2.1 + 0.3 * (math.log(2) - 0.5)) / 3)
    assert output.metrics["kl"].item() == pytest.approx(math.log(2) / 2)


def test_advantages_are_whitened_over_the_whole_batch_and_targets_are_not():
    inputs = batch()
    mask = inputs["mask"]
    found = _targets(inputs)
    assert found["advantage"][mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert found["advantage"][mask].std().item() == pytest.approx(1.0, abs=1e-6)
    rewards = token_rewards(inputs["log_mu"] - inputs["log_ref"], mask, inputs["reward"], 0.3)
    raw = generalised_advantage(rewards, inputs["value"], mask, discount=0.9, gae_lambda=0.95)
    expected = (raw + inputs["value"].detach()).where(mask, 0.0)
    torch.testing.assert_close(found["value_target"], expected)


def test_targets_ignore_padding_and_carry_no_gradient():
    inputs = batch()
    mask = inputs["mask"]
    noisy = inputs | {
        name: inputs[name].where(mask, float("nan")) for name in ("value", "log_mu", "log_ref")
    }
    before, after = _targets(inputs), _targets(noisy)
    assert set(before) == {"advantage", "value_target", "value_old"}
    for name, part in before.items():
        torch.testing.assert_close(after[name], part)
        assert not part.requires_grad


def test_with_discount_and_lambda_one_the_value_target_is_the_return():
    inputs = batch()
    found = _targets(inputs, discount=1.0, gae_lambda=1.0)["value_target"]
    # From the first token the return is the reward less the whole KL.
    kl = (inputs["log_mu"] - inputs["log_ref"]).sum(-1)
    torch.testing.assert_close(found[..., 0], inputs["reward"] - 0.3 * kl)


def test_a_critic_that_is_right_moves_nothing_but_by_the_kl():
    # Equal rewards, the value is that reward everywhere, no KL: all errors vanish.
    inputs = batch()
    reward = torch.full_like(inputs["reward"], 2.0)
    exact = inputs | {
        "reward": reward,
        "log_ref": inputs["log_mu"],
        "value": torch.full_like(inputs["value"], 2.0).requires_grad_(),
    }
    targets = _targets(exact, discount=1.0)
    loss = _ppo(exact, targets).loss
    assert grad(loss, exact["log_pi"]).abs().max() < 1e-9
    assert grad(loss, exact["value"]).abs().max() < 1e-9


def test_before_the_first_step_the_value_gradient_is_the_plain_error():
    inputs = batch()
    targets = _targets(inputs)
    found = grad(_ppo(inputs, targets).loss, inputs["value"])
    mask = inputs["mask"]
    error = (inputs["value"].detach() - targets["value_target"]).where(mask, 0.0)
    torch.testing.assert_close(found, 0.1 * error / (3 * mask.sum((1, 2), keepdim=True)))


def test_a_value_beyond_its_clip_range_on_the_way_to_its_target_has_no_gradient():
    inputs = batch()
    mask = inputs["mask"]
    targets = _targets(inputs)
    toward = torch.sign(targets["value_target"] - targets["value_old"])
    moved = (targets["value_old"] + 0.3 * toward).requires_grad_()
    far = ((targets["value_target"] - targets["value_old"]).abs() > 0.3) & mask
    found = grad(_ppo(inputs | {"value": moved}, targets).loss, moved)
    assert far.sum() > 10
    assert (found[far] == 0).all()
    back = (targets["value_old"] - 0.3 * toward).requires_grad_()
    found = grad(_ppo(inputs | {"value": back}, targets).loss, back)
    assert (found[far] != 0).all()


def test_policy_gradient_of_ppo_is_that_of_vineppo_with_the_same_advantage():
    inputs = batch()
    targets = _targets(inputs)
    names = ("log_pi", "log_mu", "log_ref", "mask", "reward")
    vine = vineppo(
        *(inputs[name] for name in names), targets["advantage"], clip_range=0.2, kl_coefficient=0.0
    )
    torch.testing.assert_close(
        grad(_ppo(inputs, targets).loss, inputs["log_pi"]), grad(vine.loss, inputs["log_pi"])
    )
