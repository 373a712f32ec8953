import pytest
import torch

from objectives.squared_batch import BETA, batch, learning, value_and_gradients
from tba.objectives.mirror_descent import a_star_po, gvpo, kimi, opmd

# One query, two samples: k_1 = (-1 + 2) + (-2 + 1) = 0, k_2 = -1 + 3 = 2 (its second token is
# padding); r = (1, 0).
LOG_PI = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0]]])
ANCHOR = torch.tensor([[[-2.0, -1.0], [-3.0, -5.0]]])
MASK = torch.tensor([[[True, True], [True, False]]])
REWARD = torch.tensor([[1.0, 0.0]])


def _on_policy(inputs):
    return learning(inputs | {"log_mu": inputs["log_pi"].detach()})


def test_kimi_by_hand():
    # tau 1/2: A = (.5 - 0, -.5 - 1) = (.5, -1.5); (.25 + 2.25) / 2 / (2 * .5) = 1.25.
    output = kimi(LOG_PI, ANCHOR, MASK, REWARD, tau=0.5)
    assert output.loss.item() == pytest.approx(1.25)
    expected = {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "equal_reward_share": 0.0,
        "advantage_abs_mean": 1.0,
    }
    assert {n: v.item() for n, v in output.metrics.items()} == pytest.approx(expected)


def test_gvpo_by_hand():
    # beta 1/2: A = (.5, -.5) - .5 (0 - 1, 2 - 1) = (1, -1); (1 + 1) / 2 / (2 * .5) = 1.
    assert gvpo(LOG_PI, ANCHOR, MASK, REWARD, beta=0.5).loss.item() == pytest.approx(1.0)


def test_opmd_by_hand():
    # log pi = -3 and -1; A = (.5, -.5); -(.5 * -3 + -.5 * -1) / 2 / (1 + 1/2) = .5 / 1.5 = 1/3.
    assert opmd(LOG_PI, MASK, REWARD, tau=0.5).loss.item() == pytest.approx(1 / 3)


def test_a_star_po_by_hand():
    # beta 1/2, log Z* = (2, 1), one a sample: A = (1 - 1 - 0, 0 - .5 - 1) = (0, -1.5);
    # (0 + 2.25) / 2 / (2 * .5) = 1.125.
    log_z_star = torch.tensor([[2.0, 1.0]])
    output = a_star_po(LOG_PI, ANCHOR, MASK, REWARD, log_z_star, beta=0.5)
    assert output.loss.item() == pytest.approx(1.125)
    assert output.metrics["log_z"].item() == pytest.approx(1.5)


def test_gvpo_is_trajectory_balance_with_the_sampling_policy_as_reference():
    inputs = batch()
    found = value_and_gradients("gvpo", inputs)
    expected = value_and_gradients("tb", inputs | {"log_ref": inputs["log_mu"]})
    torch.testing.assert_close(found[0].loss, expected[0].loss)
    torch.testing.assert_close(found[1], expected[1])


def test_kimi_is_gvpo_plus_a_pull_on_the_mean_log_ratio():
    # A differs by tau kbar, which is constant within a query, and gvpo's A has mean zero there.
    inputs = batch()
    k_mean = (inputs["log_pi"] - inputs["log_mu"]).detach().sum(-1).mean(1)
    expected = value_and_gradients("gvpo", inputs)[0].loss + BETA / 2 * k_mean.square().mean()
    torch.testing.assert_close(value_and_gradients("kimi", inputs)[0].loss, expected)


def test_on_policy_all_are_the_policy_gradient_with_mean_baseline():
    inputs = _on_policy(batch())
    reward = inputs["reward"]
    surrogate = (reward - reward.mean(1, keepdim=True)) * inputs["log_pi"].sum(-1)
    (expected,) = torch.autograd.grad(-surrogate.mean(), inputs["log_pi"])
    expected = expected.where(inputs["mask"], 0.0)
    for kind, factor in {"kimi": 1.0, "gvpo": 1.0, "opmd": 1 / (1 + BETA)}.items():
        _, gradients = value_and_gradients(kind, inputs)
        torch.testing.assert_close(gradients["log_pi"], factor * expected)


def test_a_star_po_is_tb_learned_z_at_that_log_z():
    inputs = batch()
    inputs["log_z_star"] = inputs["log_z"].detach()[:, None].expand(-1, 4).clone()
    found = value_and_gradients("a_star_po", inputs)
    expected = value_and_gradients("tb_learned_z", inputs)
    torch.testing.assert_close(found[0].loss, expected[0].loss)
    torch.testing.assert_close(found[0].metrics, expected[0].metrics)
    torch.testing.assert_close(found[1]["log_pi"], expected[1]["log_pi"])


@pytest.mark.parametrize(
    ("kind", "teaches"), [("kimi", True), ("gvpo", False), ("opmd", False), ("a_star_po", True)]
)
def test_what_one_sample_teaches(kind, teaches):
    _, gradients = value_and_gradients(kind, batch(samples=1))
    assert bool(gradients["log_pi"].any()) == teaches
