import pytest
import torch

from objectives.squared_batch import BETA, batch, value_and_gradients
from tba.objectives.tapered_trajectory_balance import tb_tapered


def test_value_by_hand():
    # One query, three samples, beta 1/2.
    # k = (-1 + 4, .) + (-2 + 1) = 2, -1 + 3 = 2 and -1 + 0 = -1; mean 1.
    # A = (1, 0, 0) - 1/3 - .5 (1, 1, -2) = (1/6, -5/6, 2/3).
    # rho = 4 * 1, 1/2 and 3; the weights are 1 (A > 0), 1/2 and 1 (A > 0).
    # log pi(y) = -3, -1, -1: loss = -(1/6 * -3 + 1/2 * -5/6 * -1 + 2/3 * -1) / 3 = .25.
    # tb_loss = (1/36 + 25/36 + 16/36) / 3 / (2 * .5) = 42/108.
    log_pi = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0], [-1.0, -9.0]]])
    log_ref = torch.tensor([[[-4.0, -1.0], [-3.0, -5.0], [0.0, -5.0]]])
    log_mu = log_pi - torch.tensor([[[4.0, 1.0], [0.5, 7.0], [3.0, 7.0]]]).log()
    mask = torch.tensor([[[True, True], [True, False], [True, False]]])
    reward = torch.tensor([[1.0, 0.0, 0.0]])
    output = tb_tapered(log_pi, log_mu, log_ref, mask, reward, beta=0.5)
    assert output.loss.item() == pytest.approx(0.25)
    expected = {
        "kl": 1.0,
        "reward_mean": 1 / 3,
        "reward_std": 2**0.5 / 3,
        "equal_reward_share": 0.0,
        "advantage_abs_mean": (1 / 6 + 5 / 6 + 2 / 3) / 3,
        "tb_loss": 42 / 108,
        "ratio_mean": 2.5,
        "clipped_share": 0.0,
    }
    assert {n: v.item() for n, v in output.metrics.items()} == pytest.approx(expected)


def test_gradient_in_closed_form():
    inputs = batch()
    pi, mu, ref = (inputs[n].detach() for n in ("log_pi", "log_mu", "log_ref"))
    k, log_rho = (pi - ref).sum(-1), (pi - mu).sum(-1)
    reward = inputs["reward"]
    advantage = (reward - reward.mean(1, keepdim=True)) - BETA * (k - k.mean(1, keepdim=True))
    weight = torch.where(advantage < 0, torch.minimum(log_rho.exp(), torch.tensor(1.0)), 1.0)
    assert 0 < (weight < 1).double().mean() < 1
    expected = -(weight * advantage)[..., None] * inputs["mask"] / reward.numel()
    _, gradients = value_and_gradients("tb_tapered", inputs)
    torch.testing.assert_close(gradients["log_pi"], expected)


def test_on_policy_it_is_trajectory_balance():
    inputs = batch()
    inputs["log_mu"] = inputs["log_pi"].detach()
    output, gradients = value_and_gradients("tb_tapered", inputs)
    tb, of_tb = value_and_gradients("tb", inputs)
    torch.testing.assert_close(gradients["log_pi"], of_tb["log_pi"])
    torch.testing.assert_close(output.metrics["tb_loss"], tb.loss.detach())


def test_what_the_policy_has_left_behind_is_not_pushed_away_and_what_is_good_still_is_learned():
    # Both samples are e^-50 times as probable as when they were found.
    log_mu = torch.zeros(1, 2, 1, dtype=torch.float64)
    log_pi = (log_mu - 50).requires_grad_()
    mask, reward = torch.ones(1, 2, 1, dtype=torch.bool), torch.tensor([[1.0, 0.0]])
    output = tb_tapered(log_pi, log_mu, log_pi.detach(), mask, reward.double(), beta=0.05)
    (gradient,) = torch.autograd.grad(output.loss, log_pi)
    assert gradient[0, 0, 0].item() == pytest.approx(-0.25)  # A = 1/2, of two samples
    assert 0 <= gradient[0, 1, 0].item() < 1e-20


def test_the_counted_share_is_of_what_is_pushed_down_and_likelier_than_when_it_was_found():
    inputs = batch()
    pi, mu = inputs["log_pi"].detach(), inputs["log_mu"]
    output, gradients = value_and_gradients("tb_tapered", inputs)
    pushed_down = gradients["log_pi"][..., 0] > 0
    expected = (pushed_down & ((pi - mu).sum(-1) > 0)).double().mean()
    torch.testing.assert_close(output.metrics["clipped_share"], expected)
    assert expected > 0
