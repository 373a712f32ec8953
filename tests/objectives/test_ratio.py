import math

import pytest
import torch

from ratio_objectives import batch, grad
from tba.objectives.masked import (
    log_ratio,
    mean_over_query_tokens,
    mean_over_sequences,
    sum_over_tokens,
)
from tba.objectives.metrics import reward_metrics
from tba.objectives.ratio import (
    MAX_LOG_RATIO,
    bounded_exp,
    clipped_surrogate,
    group_advantage,
    is_clipped,
    k3,
    kl_metric,
    scaled_group_advantage,
    weighted_surrogate,
)


def _tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


MASK = torch.tensor([[[True, True, False], [True, False, False]]])
VALUES = _tensor([[1.0, 2.0, 50.0], [6.0, float("nan"), 50.0]])


def test_means_by_hand():
    # Responses of two tokens and one: (1, 2) and (6).
    assert mean_over_sequences(VALUES, MASK).item() == pytest.approx(3.75)  # (1.5 + 6) / 2
    assert mean_over_query_tokens(VALUES, MASK).item() == pytest.approx(3.0)  # 9 / 3
    assert sum_over_tokens(VALUES, MASK).item() == pytest.approx(4.5)  # (3 + 6) / 2


def test_an_empty_response_counts_as_zero():
    empty = torch.zeros_like(MASK)
    for mean in (mean_over_sequences, mean_over_query_tokens, sum_over_tokens):
        assert mean(VALUES, empty) == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped"),
    [
        (1.0, 2.0, 2.0, False),
        (1.5, 2.0, 2.6, True),  # 1.3 * 2: nothing to gain beyond 1 + .3
        (0.5, 2.0, 1.0, False),  # below, where A wants more: unclipped
        (1.5, -2.0, -3.0, False),
        (0.5, -2.0, -1.8, True),  # .9 * -2: nothing to gain below 1 - .1
    ],
)
def test_clipped_surrogate_and_its_gradient(ratio, advantage, surrogate, clipped):
    rho, a = _tensor(ratio).requires_grad_(), _tensor(advantage)
    found = clipped_surrogate(rho, a, 0.1, 0.3)
    assert found.item() == pytest.approx(surrogate)
    assert is_clipped(rho, a, 0.1, 0.3).item() is clipped
    assert grad(found.sum(), rho).item() == pytest.approx(0.0 if clipped else advantage)


def test_weighted_surrogate_has_no_gradient_through_its_weight():
    log_pi = _tensor(-1.0).requires_grad_()
    surrogate = weighted_surrogate(log_pi.exp(), _tensor(3.0), log_pi)
    assert surrogate.item() == pytest.approx(-3 * math.exp(-1))
    assert grad(surrogate.sum(), log_pi).item() == pytest.approx(3 * math.exp(-1))


def test_k3_by_hand_and_its_gradient():
    # k1 = log 2: 1/2 + log 2 - 1.  Its gradient is 1 - exp(-k1) = 1/2.
    log_pi = torch.full((1, 1, 1), -1.0, dtype=torch.float64).requires_grad_()
    log_ref, mask = log_pi.detach() - math.log(2), torch.tensor([[[True]]])
    found = k3(log_pi, log_ref, mask)
    assert found.item() == pytest.approx(math.log(2) - 0.5)
    assert grad(found.sum(), log_pi).item() == pytest.approx(0.5)


def test_k3_is_never_negative_and_zero_at_the_reference():
    inputs = batch()
    assert (k3(inputs["log_pi"], inputs["log_ref"], inputs["mask"]) >= 0).all()
    assert (k3(inputs["log_pi"], inputs["log_pi"], inputs["mask"]) == 0).all()


def test_k3_is_unbiased_for_the_kl_from_the_policy():
    # Two outcomes: sum_y pi(y) k3(y) = sum_y pi(y) log(pi(y) / ref(y)).
    pi, ref = _tensor(0.3, 0.7), _tensor(0.6, 0.4)
    mask = torch.ones(1, 1, 2, dtype=torch.bool)
    found = k3(pi.log().view(1, 1, 2), ref.log().view(1, 1, 2), mask)  # [2] to [1, 1, 2]
    torch.testing.assert_close((pi * found).sum(), (pi * (pi / ref).log()).sum())


def test_ratios_are_bounded_and_exact_below_the_bound():
    log_rho = _tensor(-1000.0, -1.0, 0.0, 1.0, 1000.0).requires_grad_()
    rho = bounded_exp(log_rho)
    expected = _tensor(0.0, math.exp(-1), 1.0, math.e, math.exp(MAX_LOG_RATIO))
    torch.testing.assert_close(rho.detach(), expected)
    expected[-1] = 0.0  # beyond the bound
    torch.testing.assert_close(grad(rho.sum(), log_rho), expected)


def test_log_ratio_has_no_gradient_through_the_anchor_or_padding():
    inputs = batch()
    anchor = inputs["log_mu"].clone().requires_grad_()
    found = log_ratio(inputs["log_pi"], anchor, inputs["mask"])
    assert torch.autograd.grad(found.sum(), anchor, allow_unused=True) == (None,)


def test_advantages_by_hand():
    # r = (3, 1): A = (1, -1); std with K - 1: sqrt(2 / 1).
    reward = _tensor([3.0, 1.0])
    torch.testing.assert_close(group_advantage(reward), _tensor([1.0, -1.0]))
    expected = _tensor([1.0, -1.0]) / (math.sqrt(2) + 0.5)
    torch.testing.assert_close(scaled_group_advantage(reward, 0.5), expected)


def test_std_is_torch_s_and_equal_rewards_have_no_advantage():
    reward = batch()["reward"]
    expected = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(scaled_group_advantage(reward, 1e-4), expected)
    assert scaled_group_advantage(torch.ones(2, 4), 1e-4).abs().max() == 0
    assert scaled_group_advantage(torch.ones(2, 1), 1e-4).abs().max() == 0


def test_metrics_by_hand():
    # std of (3, 1) is 1, that of (2, 2) is 0.
    metrics = reward_metrics(_tensor([3.0, 1.0], [2.0, 2.0]))
    found = {name: value.item() for name, value in metrics.items()}
    assert found == {"reward_mean": 2.0, "reward_std": 0.5, "equal_reward_share": 0.5}
    # log pi - log ref: (1 - 2, 2 - 3) and 6 - 4; sums -2 and 2, mean 0; then 1 more each: 3 / 2.
    ref = _tensor([[2.0, 3.0, 1.0], [4.0, 1.0, 1.0]])
    assert kl_metric(VALUES, ref, MASK)["kl"].item() == pytest.approx(0.0)
    assert kl_metric(VALUES, ref - 1, MASK)["kl"].item() == pytest.approx(1.5)
