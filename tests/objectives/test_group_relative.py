import math

import pytest
import torch

from ratio_objectives import batch, grad, hand
from tba.objectives.group_relative import dr_grpo, grpo, gspo

SQRT2 = math.sqrt(2)


def _group(inputs):
    return [inputs[name] for name in ("log_pi", "log_mu", "mask", "reward")]


def _values(metrics):
    return {name: value.item() for name, value in metrics.items()}


def test_grpo_by_hand():
    # Ratios (1.5, .5) and (.5); r = (3, 1), so A = +-1, std sqrt 2, and with eps 2 - sqrt 2: +-1/2.
    # Sample 1: min(.75, .6) = .6 and min(.25, .4) = .25; mean .425.
    # Sample 2: min(-.25, -.4) = -.4.  Mean of the two: .0125.
    # log ref = log pi but at sample 2, where k1 = log 2 and k3 = log 2 - 1/2; its mean: half of it.
    log_pi, log_mu, mask, reward = hand()
    log_ref = log_pi.clone()
    log_ref[0, 1, 0] -= math.log(2)
    output = grpo(
        log_pi, log_mu, log_ref, mask, reward, beta=0.1, clip_range=0.2, std_epsilon=2 - SQRT2
    )
    assert output.loss.item() == pytest.approx(-0.0125 + 0.1 * (math.log(2) - 0.5) / 2)
    expected = {
        "reward_mean": 2.0,
        "reward_std": 1.0,
        "equal_reward_share": 0.0,
        "kl": math.log(2) / 2,
        "ratio_mean": 2.5 / 3,
        "clipped_share": 2 / 3,  # 1.5 with A > 0, .5 with A < 0
    }
    assert _values(output.metrics) == pytest.approx(expected)


def test_dr_grpo_by_hand():
    # A = +-1.  Sample 1: 1.2 + .5 = 1.7; sample 2: -.8.  Mean .45, by 4 tokens: .1125.
    output = dr_grpo(*hand(), 4, clip_range=0.2)
    assert output.loss.item() == pytest.approx(-0.1125)
    assert output.metrics["clipped_share"].item() == pytest.approx(2 / 3)


def test_gspo_by_hand():
    # s_1 = sqrt(1.5 * .5), inside [.7, 1.4]; s_2 = .5, clipped to .7 as A < 0; A = +-1/2.
    output = gspo(*hand(), clip_low=0.3, clip_high=0.4, std_epsilon=2 - SQRT2)
    first = math.sqrt(0.75)
    assert output.loss.item() == pytest.approx(-(first / 2 - 0.35) / 2)
    assert output.metrics["ratio_mean"].item() == pytest.approx((first + 0.5) / 2)
    assert output.metrics["clipped_share"].item() == pytest.approx(0.5)


def test_rewards_are_scale_free_with_std_and_not_without():
    log_pi, log_mu, mask, reward = _group(batch())
    settings = {"clip_low": 0.1, "clip_high": 0.1, "std_epsilon": 1e-12}
    torch.testing.assert_close(
        gspo(log_pi, log_mu, mask, reward, **settings).loss,
        gspo(log_pi, log_mu, mask, 5 * reward, **settings).loss,
    )
    torch.testing.assert_close(
        5 * dr_grpo(log_pi, log_mu, mask, reward, 7, clip_range=0.2).loss,
        dr_grpo(log_pi, log_mu, mask, 5 * reward, 7, clip_range=0.2).loss,
    )


def test_grpo_s_kl_gradient_remains_with_equal_rewards():
    inputs = batch()
    log_pi, log_ref, mask = (inputs[name] for name in ("log_pi", "log_ref", "mask"))
    loss = grpo(
        log_pi,
        inputs["log_mu"],
        log_ref,
        mask,
        torch.ones_like(inputs["reward"]),
        beta=0.3,
        clip_range=0.2,
        std_epsilon=1e-4,
    ).loss
    # d k3 / d log pi = 1 - ref / pi
    expected = 0.3 * (1 - (log_ref - log_pi.detach()).exp()) * mask / mask.sum(-1, keepdim=True)
    torch.testing.assert_close(grad(loss, log_pi), expected / 12)


def test_grpo_and_dr_grpo_agree_when_all_responses_have_the_longest_length():
    inputs = batch()
    log_pi, log_mu, _, reward = _group(inputs)
    mask = torch.ones_like(inputs["mask"])
    grpo_loss = grpo(
        log_pi, log_mu, inputs["log_ref"], mask, reward, beta=0.0, clip_range=0.2, std_epsilon=1e6
    ).loss
    dr_loss = dr_grpo(log_pi, log_mu, mask, reward, 5, clip_range=0.2).loss
    torch.testing.assert_close(grpo_loss * 1e6, dr_loss, rtol=1e-5, atol=0)


def test_gspo_equals_grpo_on_responses_of_one_token():
    inputs = batch(tokens=1)
    log_pi, log_mu, mask, reward = _group(inputs)
    a = grpo(
        log_pi, log_mu, inputs["log_ref"], mask, reward, beta=0.0, clip_range=0.2, std_epsilon=0.1
    )
    b = gspo(log_pi, log_mu, mask, reward, clip_low=0.2, clip_high=0.2, std_epsilon=0.1)
    torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(grad(a.loss, log_pi), grad(b.loss, log_pi))


def test_clipped_tokens_get_no_gradient():
    log_pi, log_mu, mask, reward = hand()
    log_pi.requires_grad_()
    gradient = grad(dr_grpo(log_pi, log_mu, mask, reward, 4, clip_range=0.2).loss, log_pi)
    # The one that is not clipped: -rho A / (2 samples * 4 tokens) = -.5 / 8.
    expected = torch.tensor([[[0.0, -0.0625], [0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
