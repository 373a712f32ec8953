"""The halves of TB's update: with no ratio it is TB's, with both it is that of TBA'."""

import pytest
import torch
from benchmarks.stale_cause import CAP, SIDES, damped

from tba.objectives.trajectory_balance import trajectory_balance
from tba.objectives.trajectory_balance_prime import tb_prime


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 4, 5)
    log_pi, log_mu, log_ref = (-torch.rand(shape, generator=generator) * 3 for _ in range(3))
    mask = torch.arange(5) < torch.randint(1, 6, (3, 4, 1), generator=generator)
    reward = torch.randn(3, 4, generator=generator)
    return log_pi, log_mu, log_ref, mask, reward


def gradient(loss, log_pi):
    return torch.autograd.grad(loss, log_pi)[0]


@pytest.mark.parametrize("progress", [0.0, 0.4])
def test_the_whole_update_is_that_of_the_objectives(inputs, progress):
    log_pi, _, log_ref, mask, reward = inputs
    log_pi.requires_grad_()
    beta = 0.3 - 0.25 * progress
    none, away, near, both = (
        gradient(damped(*inputs, progress, away=on[0], near=on[1]).loss, log_pi)
        for on in SIDES.values()
    )
    tb = trajectory_balance(log_pi, log_ref, mask, reward, beta=beta).loss
    prime = tb_prime(*inputs, beta=beta, ratio_cap=CAP, kl_clamp=None).loss
    torch.testing.assert_close(none, gradient(tb, log_pi))
    torch.testing.assert_close(both, gradient(prime, log_pi))
    torch.testing.assert_close(away + near, none + both)
    assert (away * none < 0).sum() == 0, "a weight changes no direction"
    moved_away = none > 0  # the loss falls as log pi does
    assert torch.equal(away[~moved_away], none[~moved_away])
    assert torch.equal(near[moved_away], none[moved_away])
