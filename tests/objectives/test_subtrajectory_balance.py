import pytest
import torch

from objectives.squared_batch import BETA, batch, learning, value_and_gradients
from objectives.tree import call
from tba.objectives.subtrajectory_balance import subtb


def _by_definition(inputs, beta, subtb_lambda):
    """The paper's sum over sub-trajectories, from log R, p_F and p_T of every state in turn."""
    losses = []
    lengths = inputs["mask"].sum(-1)
    for query, sample in torch.cartesian_prod(*map(torch.arange, lengths.shape)).tolist():
        one = {n: v[query, sample] for n, v in inputs.items() if v.ndim >= 2}
        finished = bool(one["finished"])
        states = int(lengths[query, sample]) + (0 if finished else 1)
        log_r, log_stop = [], []
        for t in range(states):
            total = one["log_ref"][:t].sum()
            if t < states - 1:
                total = total + one["log_ref_stop"][t] + one["prefix_reward"][t] / beta
                log_stop.append(one["log_stop"][t])
            elif finished:  # ended by its last token
                total = total + one["log_ref"][t] + one["reward"] / beta
                log_stop.append(one["log_pi"][t])
            else:  # cut: stops here for certain
                total = total + one["reward"] / beta
                log_stop.append(torch.zeros((), dtype=torch.float64))
            log_r.append(total)
        delta = [
            log_r[t] + one["log_pi"][t] + log_stop[t + 1] - log_r[t + 1] - log_stop[t]
            for t in range(states - 1)
        ]
        pairs = [(a, b) for a in range(states) for b in range(a + 1, states)]
        squares = [subtb_lambda ** (b - a - 1) * sum(delta[a:b]) ** 2 for a, b in pairs]
        weight = sum(subtb_lambda ** (b - a - 1) for a, b in pairs)
        losses.append(sum(squares) / weight if pairs else torch.zeros((), dtype=torch.float64))
    return beta / 2 * torch.stack(losses).mean()


def test_value_by_hand():
    # One query, beta 1/2, lambda 1/2. A_t = r_t - beta (log pi - log ref) of y_<t and the stop.
    # Sample 1 is cut after two tokens: states s_0, s_1, s_2.
    #   A_0 = 0 - .5 (-1 + 3) = -1; A_1 = 2 - .5 ((-1 + 2) + (-2 + 1)) = 2;
    #   A_2 = 1 - .5 ((-1 + 2) + (-1 + 2)) = 0, its stop being certain.
    #   (9 + 4 + .5 * 1) / (1 + 1 + .5) = 13.5 / 2.5 = 5.4.
    # Sample 2 ends with its second token: states s_0, s_1, the end token being the stop at s_1.
    #   A_0 = -1 (the same state); A_1 = 3 - .5 ((-1 + 2) + (-3 + 1)) = 3.5; 4.5^2 = 20.25.
    # Mean (5.4 + 20.25) / 2 = 12.825, over 2 beta = 1.
    inputs = {
        "log_pi": torch.tensor([[[-1.0, -1.0], [-1.0, -3.0]]]),
        "log_ref": torch.tensor([[[-2.0, -2.0], [-2.0, -1.0]]]),
        "log_stop": torch.tensor([[[-1.0, -2.0], [-1.0, -3.0]]]),
        "log_ref_stop": torch.tensor([[[-3.0, -1.0], [-3.0, -1.0]]]),
        "prefix_reward": torch.tensor([[[0.0, 2.0], [0.0, 3.0]]]),
        "mask": torch.ones(1, 2, 2, dtype=torch.bool),
        "reward": torch.tensor([[1.0, 3.0]]),
        "finished": torch.tensor([[False, True]]),
    }
    output = call(subtb, inputs, beta=0.5, subtb_lambda=0.5)
    assert output.loss.item() == pytest.approx(12.825)
    expected = {
        "kl": 0.5,  # (2 - 1) / 2
        "reward_mean": 2.0,
        "reward_std": 1.0,
        "equal_reward_share": 0.0,
        "log_z": -2.0,  # A_0 / beta
    }
    assert {n: v.item() for n, v in output.metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize("subtb_lambda", [0.2, 0.9, 1.0])
def test_it_is_the_sum_over_sub_trajectories_of_its_definition(subtb_lambda):
    inputs = batch(tokens=6)
    assert inputs["finished"].any()
    assert not inputs["finished"].all()
    loss = call(subtb, inputs, beta=BETA, subtb_lambda=subtb_lambda).loss
    expected = _by_definition(inputs, BETA, subtb_lambda)
    torch.testing.assert_close(loss, expected)
    learned = (inputs["log_pi"], inputs["log_stop"])
    found = torch.autograd.grad(loss, learned)
    torch.testing.assert_close(found, torch.autograd.grad(expected, learned))


def test_at_subtb_lambda1_it_is_the_variance_of_trajectory_balance_over_prefixes():
    # Make a query of the prefixes of one cut response, each stopped: its VarGrad loss, a variance
    # over n, is (n - 1) / (2 n) times the loss here, a mean over the n (n - 1) / 2 pairs.
    inputs = batch(queries=1, samples=1, tokens=4)
    inputs["mask"] = torch.ones_like(inputs["mask"])
    inputs["finished"] = torch.zeros_like(inputs["finished"])
    pi, ref = inputs["log_pi"].detach()[0, 0], inputs["log_ref"][0, 0]
    stop, ref_stop = inputs["log_stop"].detach()[0, 0], inputs["log_ref_stop"][0, 0]
    last = torch.zeros(1, dtype=pi.dtype)
    prefixes = {
        "log_pi": torch.stack([pi[:t].sum() for t in range(5)]) + torch.cat([stop, last]),
        "log_ref": torch.stack([ref[:t].sum() for t in range(5)]) + torch.cat([ref_stop, last]),
    }
    query = {n: v.reshape(1, 5, 1) for n, v in prefixes.items()}
    query["mask"] = torch.ones(1, 5, 1, dtype=torch.bool)
    query["reward"] = torch.cat([inputs["prefix_reward"][0, 0], inputs["reward"][0]]).reshape(1, 5)
    tb, _ = value_and_gradients("tb", learning(query))
    loss = call(subtb, inputs, beta=BETA, subtb_lambda=1.0).loss.detach()
    torch.testing.assert_close(tb.loss.detach(), loss * (5 - 1) / 5 / 2)


def test_a_response_of_one_state_counts_as_zero():
    inputs = batch(queries=1, samples=2, tokens=1)
    inputs["finished"] = torch.tensor([[True, False]])
    output, gradients = value_and_gradients("subtb", inputs)
    assert (gradients["log_pi"][0, 0] == 0).all()
    assert (gradients["log_pi"][0, 1] != 0).all()
    inputs["finished"] = torch.tensor([[True, True]])
    nothing, gradients = value_and_gradients("subtb", inputs)
    assert output.loss > 0
    assert nothing.loss == 0
    assert (gradients["log_stop"] == 0).all()


def test_the_stop_before_the_end_token_is_read_from_the_token():
    inputs = batch()
    before, gradients = value_and_gradients("subtb", inputs)
    last = torch.nn.functional.one_hot(inputs["mask"].sum(-1) - 1, 5).bool()
    at_end = last & inputs["finished"].unsqueeze(-1)
    assert (gradients["log_stop"][at_end] == 0).all()
    changed = {n: inputs[n].detach().where(~at_end, -99.0) for n in ("log_stop", "prefix_reward")}
    after, _ = value_and_gradients("subtb", learning(inputs | changed))
    torch.testing.assert_close(after.loss, before.loss)


def test_float32_is_accurate_on_long_responses():
    inputs = batch(queries=1, samples=2, tokens=300)
    low = {n: v.detach().float() if v.is_floating_point() else v for n, v in inputs.items()}
    for kind in ("subtb", "subtb short"):
        exact, gradients = value_and_gradients(kind, inputs)
        rough, low_gradients = value_and_gradients(kind, learning(low))
        torch.testing.assert_close(rough.loss.double(), exact.loss, rtol=1e-4, atol=0)
        size = gradients["log_pi"].abs().max().item()
        torch.testing.assert_close(
            low_gradients["log_pi"].double(), gradients["log_pi"], rtol=1e-3, atol=1e-4 * size
        )
