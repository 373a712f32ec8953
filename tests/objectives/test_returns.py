import pytest
import torch

from ratio_objectives import batch
from tba.objectives.returns import (
    generalised_advantage,
    next_value,
    reverse_scan,
    token_rewards,
    whitened,
)

NAN = float("nan")


def _row(*values):
    """One query, one sample."""
    return torch.tensor([[values]], dtype=torch.float64)


HOLE = torch.tensor([[[True, False, True, True, False]]])
"""Response tokens 0, 2 and 3: a hole at 1, padding at 4."""


def test_scan_by_hand_passes_over_what_the_mask_leaves_out():
    # x_3 = 4; x_2 = 2 + 4 / 2 = 4; x_0 = 1 + 4 / 2 = 3; outside, the next one is passed on.
    found = reverse_scan(_row(1.0, NAN, 2.0, 4.0, NAN), 0.5, HOLE)
    torch.testing.assert_close(found, _row(3.0, 4.0, 4.0, 4.0, 0.0))


def test_next_value_is_that_of_the_next_response_token():
    found = next_value(_row(1.0, NAN, 2.0, 4.0, NAN), HOLE)
    torch.testing.assert_close(found.where(HOLE, 0.0), _row(2.0, 0.0, 4.0, 0.0, 0.0))


def test_the_score_is_at_the_last_response_token():
    found = token_rewards(_row(1.0, NAN, -2.0, 3.0, NAN), HOLE, torch.tensor([[10.0]]), 0.5)
    torch.testing.assert_close(found, _row(-0.5, 0.0, 1.0, 8.5, 0.0))


def test_token_rewards_sum_to_the_reward_less_the_kl():
    inputs = batch()
    log_k = inputs["log_mu"] - inputs["log_ref"]
    found = token_rewards(log_k, inputs["mask"], inputs["reward"], 0.3).sum(-1)
    torch.testing.assert_close(found, inputs["reward"] - 0.3 * log_k.sum(-1))


def test_generalised_advantage_by_hand():
    # gamma 1/2, lambda 1/2.  delta_1 = 3 - 2 = 1; delta_0 = 1 + 2 / 2 - 4 = -2.
    # A_1 = 1; A_0 = -2 + 1 / 4 = -1.75.
    mask = torch.tensor([[[True, True, False]]])
    found = generalised_advantage(
        _row(1.0, 3.0, 0.0), _row(4.0, 2.0, NAN), mask, discount=0.5, gae_lambda=0.5
    )
    torch.testing.assert_close(found, _row(-1.75, 1.0, 0.0))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_generalised_advantage_is_the_lambda_sum_of_errors(gae_lambda):
    # The definition, token by token over the response tokens alone; masks have holes.
    inputs, discount = batch(tokens=7), 0.9
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(inputs["mask"].shape, generator=generator) < 0.7
    rewards, value = inputs["log_ref"], inputs["value"].detach()
    found = generalised_advantage(
        rewards.where(mask, 0.0), value, mask, discount=discount, gae_lambda=gae_lambda
    )
    for query in range(3):
        for sample in range(4):
            at = mask[query, sample].nonzero().flatten().tolist()
            r, v = rewards[query, sample, at].tolist(), [*value[query, sample, at].tolist(), 0.0]
            delta = [r[t] + discount * v[t + 1] - v[t] for t in range(len(at))]
            expected = [
                sum((discount * gae_lambda) ** (s - t) * delta[s] for s in range(t, len(at)))
                for t in range(len(at))
            ]
            assert found[query, sample, at].tolist() == pytest.approx(expected)
    assert (found[~mask] == 0).all()


def test_lambda_one_is_the_return_less_the_value():
    inputs = batch()
    mask, value = inputs["mask"], inputs["value"].detach()
    rewards = token_rewards(inputs["log_ref"], mask, inputs["reward"], 0.3)
    found = generalised_advantage(rewards, value, mask, discount=0.9, gae_lambda=1.0)
    expected = (reverse_scan(rewards, 0.9, mask) - value).where(mask, 0.0)
    torch.testing.assert_close(found, expected)


def test_whitened_values_have_mean_zero_and_std_one_over_the_batch():
    inputs = batch()
    mask = inputs["mask"]
    found = whitened(10 + 3 * inputs["value"].detach(), mask)
    assert found[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert found[mask].std().item() == pytest.approx(1.0, abs=1e-6)
    assert (found[~mask] == 0).all()


def test_a_single_token_is_whitened_to_zero():
    assert whitened(_row(5.0), torch.tensor([[[True]]])).item() == 0.0
