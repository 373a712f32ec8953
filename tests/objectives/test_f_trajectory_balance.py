import math

import pytest
import torch

from objectives.squared_batch import BETA, KINDS, batch, value_and_gradients
from tba.objectives.f_trajectory_balance import PHI, f_tb

every_phi = pytest.mark.parametrize(
    ("phi", "scale"), [("huber", 0.7), ("linex", 1.5), ("linex", -1.5)]
)


def _f_tb(inputs, **settings):
    arguments = [inputs[n] for n in ("log_pi", "log_ref", "mask", "reward")]
    output = f_tb(*arguments, beta=BETA, **settings)
    return output, torch.autograd.grad(output.loss, inputs["log_pi"])[0]


def _residual(inputs):
    k = (inputs["log_pi"] - inputs["log_ref"]).detach().sum(-1)
    score = k - inputs["reward"] / BETA
    return score - score.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("phi", "scale", "expected"),
    [
        # The batch of trajectory balance: beta 1/2, residuals -2 and 2.
        # Huber at 1: 1 (2 - 1/2) = 1.5 each, times beta.
        ("huber", 1.0, 0.75),
        # Huber at 3: the squares 2 and 2, as in trajectory balance, times beta.
        ("huber", 3.0, 1.0),
        # LINEX at 2: 4 (e^-1 + 1 - 1) and 4 (e - 1 - 1), their mean times beta; mirrored, it
        # has the same residuals, swapped.
        ("linex", 2.0, 0.5 * 2 * (math.exp(-1) + math.e - 2)),
        ("linex", -2.0, 0.5 * 2 * (math.exp(-1) + math.e - 2)),
    ],
)
def test_value_by_hand(phi, scale, expected):
    log_pi = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0]]])
    log_ref = torch.tensor([[[-2.0, -1.0], [-3.0, -5.0]]])
    mask = torch.tensor([[[True, True], [True, False]]])
    reward = torch.tensor([[1.0, 0.0]])
    output = f_tb(log_pi, log_ref, mask, reward, beta=0.5, phi=phi, scale=scale)
    assert output.loss.item() == pytest.approx(expected)
    assert output.metrics["log_z"].item() == pytest.approx(0.0)
    assert output.metrics["advantage_abs_mean"].item() == pytest.approx(1.0)


@every_phi
def test_gradient_is_beta_times_the_derivative_of_phi(phi, scale):
    # log Z is detached, and with these phi that matters, so finite differences are something else.
    inputs = batch()
    x = _residual(inputs)
    slope = x.clamp(-scale, scale) if phi == "huber" else scale * (torch.exp(x / scale) - 1)
    expected = BETA * slope[..., None] * inputs["mask"] / x.numel()
    _, found = _f_tb(inputs, phi=phi, scale=scale)
    torch.testing.assert_close(found, expected)


@every_phi
def test_phi_passes_gradcheck_and_is_half_the_square_near_zero(phi, scale):
    x = torch.tensor([-3.0, -0.4, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: PHI[phi](x, scale), x)
    small = 1e-4 * x.detach()
    torch.testing.assert_close(PHI[phi](small, scale), small.square() / 2, rtol=1e-3, atol=0)
    assert (PHI[phi](x, scale) > 0).all()
    assert PHI[phi](torch.zeros(1), scale) == 0


@every_phi
def test_with_a_large_scale_it_is_trajectory_balance(phi, scale):
    inputs = batch()
    output, found = _f_tb(inputs, phi=phi, scale=math.copysign(1e6, scale))
    tb, gradients = value_and_gradients("tb", inputs)
    torch.testing.assert_close(output.loss, tb.loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(found, gradients["log_pi"], rtol=1e-4, atol=1e-6)


def test_huber_clips_the_advantage():
    inputs = batch()
    advantage = (-BETA * _residual(inputs)).clamp(-0.7 * BETA, 0.7 * BETA)
    _, found = _f_tb(inputs, phi="huber", scale=0.7)
    expected = -(advantage[..., None] * inputs["mask"]) / advantage.numel()
    torch.testing.assert_close(found, expected)
    assert (_residual(inputs).abs() > 0.7).any()


def test_linex_above_zero_weighs_responses_that_are_too_probable():
    x = torch.tensor([2.0, -2.0])
    too_probable, too_improbable = PHI["linex"](x, 1.0)
    assert too_probable > too_improbable
    torch.testing.assert_close(PHI["linex"](x, -1.0), PHI["linex"](-x, 1.0))


def test_linex_at_minus_one_with_samples_of_the_policy_is_the_forward_kl():
    # Weighted by pi, -(exp(-delta) - 1) grad log pi sums to -sum_y pi* grad log pi.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    log_p = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    log_pi = logits.log_softmax(0)
    slope = torch.autograd.functional.jacobian(
        lambda x: PHI["linex"](x, -1.0).sum(), (log_pi - log_p).detach()
    )
    (found,) = torch.autograd.grad((log_pi.exp().detach() * slope * log_pi).sum(), logits)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - logits.log_softmax(0))).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_both_functions_are_among_the_kinds_that_the_family_is_tested_with():
    assert {settings["phi"] for _, settings in KINDS.values() if "phi" in settings} == set(PHI)
