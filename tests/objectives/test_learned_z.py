import pytest
import torch

from objectives.squared_batch import BETA, batch, learning, value_and_gradients
from tba.objectives.learned_z import dro, flowrl, tb_learned_z

# One query, two samples: k_1 = (-1 + 2) + (-2 + 1) = 0, k_2 = -1 + 3 = 2 (its second token is
# padding); r = (1, 0).
LOG_PI = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0]]])
LOG_REF = torch.tensor([[[-2.0, -1.0], [-3.0, -5.0]]])
MASK = torch.tensor([[[True, True], [True, False]]])
REWARD = torch.tensor([[1.0, 0.0]])
LOG_Z = torch.tensor([1.0])


def _vargrad_log_z(inputs):
    k = (inputs["log_pi"] - inputs["log_ref"]).detach().sum(-1)
    return (inputs["reward"] / BETA - k).mean(dim=1)


def test_tb_learned_z_by_hand():
    # beta 1/2: residuals 1 + 0 - 2 = -1 and 1 + 2 - 0 = 3; (beta / 2) (1 + 9) / 2 = 1.25.
    output = tb_learned_z(LOG_PI, LOG_REF, MASK, REWARD, LOG_Z, beta=0.5)
    assert output.loss.item() == pytest.approx(1.25)
    expected = {
        "kl": 1.0,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "equal_reward_share": 0.0,
        "advantage_abs_mean": 1.0,  # A = (.5, -1.5)
        "log_z": 1.0,
    }
    assert {n: v.item() for n, v in output.metrics.items()} == pytest.approx(expected)


def test_dro_by_hand():
    # beta 1/2, V = 1: 1 - 1 - 0 = 0 and 0 - 1 - 1 = -2; (0 + 4) / 2 / 2 = 1.
    output = dro(LOG_PI, LOG_REF, MASK, REWARD, LOG_Z, beta=0.5)
    assert output.loss.item() == pytest.approx(1.0)
    assert output.metrics["log_z"].item() == pytest.approx(2.0)  # V / beta


def test_flowrl_by_hand():
    # beta 1/2, rewards standardised to (1, -1), lengths 2 and 1: residuals 1 + 0 - 2 = -1 and
    # 1 + 2 / 1 + 2 = 5; (beta / 2) (1 + 25) / 2 = 3.25.
    output = flowrl(LOG_PI, LOG_REF, MASK, REWARD, LOG_Z, beta=0.5, std_epsilon=1e-9)
    assert output.loss.item() == pytest.approx(3.25)


def test_with_the_vargrad_log_z_it_is_trajectory_balance():
    inputs = batch()
    inputs["log_z"] = _vargrad_log_z(inputs).requires_grad_()
    learned, gradients = value_and_gradients("tb_learned_z", inputs)
    tb, tb_gradients = value_and_gradients("tb", inputs)
    torch.testing.assert_close(learned.loss, tb.loss)
    torch.testing.assert_close(gradients["log_pi"], tb_gradients["log_pi"])
    # VarGrad's is the log Z of least loss: no gradient is left for it.
    torch.testing.assert_close(gradients["log_z"], torch.zeros_like(gradients["log_z"]))


def test_gradients_are_minus_the_mean_advantage():
    inputs = batch()
    k = (inputs["log_pi"] - inputs["log_ref"]).detach().sum(-1)
    advantage = inputs["reward"] - BETA * inputs["log_z"].detach()[:, None] - BETA * k
    _, gradients = value_and_gradients("tb_learned_z", inputs)
    expected = -(advantage[..., None] * inputs["mask"]) / advantage.numel()
    torch.testing.assert_close(gradients["log_pi"], expected)
    torch.testing.assert_close(gradients["log_z"], -advantage.sum(1) / advantage.numel())


def test_dro_is_beta_times_tb_learned_z_at_v_equal_beta_log_z():
    inputs = batch()
    tb, tb_gradients = value_and_gradients("tb_learned_z", inputs)
    values = learning(inputs | {"log_z": BETA * inputs["log_z"]})
    found, gradients = value_and_gradients("dro", values)
    torch.testing.assert_close(found.loss, BETA * tb.loss)
    torch.testing.assert_close(gradients["log_pi"], BETA * tb_gradients["log_pi"])
    torch.testing.assert_close(gradients["log_z"], tb_gradients["log_z"])  # beta / beta
    torch.testing.assert_close(found.metrics["log_z"], tb.metrics["log_z"])


def test_flowrl_on_one_token_each_is_tb_learned_z_on_standardised_rewards():
    inputs = batch(tokens=1)
    reward = inputs["reward"]
    standard = (reward - reward.mean(1, keepdim=True)) / reward.std(1, correction=0, keepdim=True)
    found = value_and_gradients("flowrl", inputs)
    expected = value_and_gradients("tb_learned_z", learning(inputs | {"reward": standard}))
    torch.testing.assert_close(found[0].loss, expected[0].loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_flowrl_ignores_the_scale_of_the_rewards_and_equal_rewards():
    inputs = batch()
    before, _ = value_and_gradients("flowrl", inputs)
    scaled, _ = value_and_gradients("flowrl", learning(inputs | {"reward": 50 * inputs["reward"]}))
    torch.testing.assert_close(scaled.loss, before.loss, rtol=1e-5, atol=0)
    # 100.1 is no float32, and a mean of such numbers need not be one of them: still exactly none.
    low = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
    losses = [
        value_and_gradients(
            "flowrl", learning(low | {"reward": torch.full_like(low["reward"], value)})
        )[0].loss
        for value in (0.0, 100.1)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", ["tb_learned_z", "dro", "flowrl"])
def test_one_sample_teaches(kind):
    output, gradients = value_and_gradients(kind, batch(samples=1))
    assert output.loss > 0
    assert gradients["log_pi"].abs().max() > 0
    assert gradients["log_z"].abs().min() > 0
