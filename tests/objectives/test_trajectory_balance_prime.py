import pytest
import torch

from objectives.squared_batch import BETA, KINDS, batch, value_and_gradients
from tba.objectives.trajectory_balance_prime import tb_prime


def test_value_by_hand():
    # One query, two samples, beta 1/2, cap 2, clamp 1.
    # Token KLs: (-1 + 4, -2 + 1) = (3, -1) and (-1 + 3) = 2, clamped (1, -1) and 1; k = (0, 1).
    # A = (1 - .5, 0 - .5) - .5 (0 - .5, 1 - .5) = (.75, -.75).
    # rho: (exp(log 4), exp(0)) = (4, 1) and exp(log 1/2) = 1/2; capped (2, 1) and 1/2.
    # Surrogates: 2 * -1 + 1 * -2 = -4 and .5 * -1 = -.5.
    # Loss: -(.75 * -4 + -.75 * -.5) / 2 = -(-3 + .375) / 2 = 1.3125.
    # Without clamp k = (2, 2) and A = (.5, -.5): tb_loss = (.25 + .25) / 2 / (2 * .5) = .25.
    log_pi = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0]]])
    log_ref = torch.tensor([[[-4.0, -1.0], [-3.0, -5.0]]])
    log_mu = log_pi - torch.tensor([[[4.0, 1.0], [0.5, 7.0]]]).log()
    mask = torch.tensor([[[True, True], [True, False]]])
    reward = torch.tensor([[1.0, 0.0]])
    output = tb_prime(log_pi, log_mu, log_ref, mask, reward, beta=0.5, ratio_cap=2.0, kl_clamp=1.0)
    assert output.loss.item() == pytest.approx(1.3125)
    expected = {
        "kl": 2.0,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "equal_reward_share": 0.0,
        "advantage_abs_mean": 0.75,
        "tb_loss": 0.25,
        "ratio_mean": (4 + 1 + 0.5) / 3,
        "clipped_share": 1 / 3,
    }
    assert {n: v.item() for n, v in output.metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize(("cap", "clamp"), [(1.2, 0.4), (8.0, None), (None, 10.0)])
def test_gradient_in_closed_form(cap, clamp):
    # A and the weights are detached, so finite differences of the loss are something else.
    inputs = batch()
    pi, mu, ref = (inputs[n].detach() for n in ("log_pi", "log_mu", "log_ref"))
    mask, reward = inputs["mask"], inputs["reward"]
    token = (pi - ref).clamp(-clamp, clamp) if clamp else pi - ref
    k = token.sum(-1)
    advantage = (reward - reward.mean(1, keepdim=True)) - BETA * (k - k.mean(1, keepdim=True))
    weight = torch.minimum((pi - mu).exp(), torch.tensor(cap)) if cap else torch.ones_like(pi)
    expected = -advantage[..., None] * weight * mask / reward.numel()
    arguments = [inputs[n] for n in ("log_pi", "log_mu", "log_ref", "mask", "reward")]
    loss = tb_prime(*arguments, beta=BETA, ratio_cap=cap, kl_clamp=clamp).loss
    (found,) = torch.autograd.grad(loss, inputs["log_pi"])
    torch.testing.assert_close(found, expected)


def test_without_limits_it_has_the_gradient_of_trajectory_balance():
    inputs = batch()
    prime, prime_gradient = value_and_gradients("tb_prime without limits", inputs)
    tb, tb_gradient = value_and_gradients("tb", inputs)
    torch.testing.assert_close(prime_gradient, tb_gradient)
    torch.testing.assert_close(prime.metrics["tb_loss"], tb.loss.detach())
    assert prime.metrics["clipped_share"] == 0


def test_on_policy_the_ratio_is_one_and_wide_limits_change_nothing():
    inputs = batch()
    inputs["log_mu"] = inputs["log_pi"].detach()
    arguments = [inputs[n] for n in ("log_pi", "log_mu", "log_ref", "mask", "reward")]
    output = tb_prime(*arguments, beta=BETA, ratio_cap=8.0, kl_clamp=10.0)
    (found,) = torch.autograd.grad(output.loss, inputs["log_pi"])
    torch.testing.assert_close(found, value_and_gradients("tb", inputs)[1]["log_pi"])
    assert output.metrics["ratio_mean"] == 1
    assert KINDS["tb_prime"][0] is tb_prime


def test_a_token_that_the_sampler_thought_impossible_has_the_cap_as_weight():
    inputs = batch(queries=1, samples=2, tokens=1)
    inputs["log_mu"] = torch.full_like(inputs["log_mu"], -1e4)
    _, gradients = value_and_gradients("tb_prime", inputs)
    inputs["log_mu"] = inputs["log_pi"].detach() - 0.5  # e^.5 is above the cap of 1.2, too
    torch.testing.assert_close(value_and_gradients("tb_prime", inputs)[1], gradients)
    assert gradients["log_pi"].abs().max() > 0
