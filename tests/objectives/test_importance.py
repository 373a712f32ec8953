import math

import pytest
import torch

from ratio_objectives import batch, grad, hand
from tba.objectives.importance import (
    cispo,
    decoupled_ppo,
    icepop,
    m2po,
    tis,
    within_second_moment,
)

FIRST, SECOND = -1 + math.log(1.5), -1 + math.log(0.5)
"""log pi of `hand()`'s tokens: (FIRST, SECOND) of sample 1, A = 1; SECOND of sample 2, A = -1."""


def _group(inputs, *anchors):
    return [inputs[name] for name in ("log_pi", *anchors, "log_mu", "mask", "reward")]


def _closed_form(inputs, weight, mean):
    """Return -w A mean-weight at each token, computed token by token in python."""
    log_pi, log_mu, mask, reward = (part.detach() for part in _group(inputs))
    gradient = torch.zeros_like(log_pi)
    for query, sample, token in mask.nonzero().tolist():
        advantage = reward[query, sample] - reward[query].mean()
        rho = math.exp(log_pi[query, sample, token] - log_mu[query, sample, token])
        tokens = mask[query].sum() if mean == "query" else 4 * mask[query, sample].sum()
        gradient[query, sample, token] = -weight(rho) * advantage / tokens / 3
    return gradient


def test_cispo_by_hand():
    # Weights min(rho, 1.2): (1.2, .5) and .5.
    output = cispo(*hand(), ratio_cap=1.2)
    assert output.loss.item() == pytest.approx(-(1.2 * FIRST + 0.5 * SECOND - 0.5 * SECOND) / 3)
    assert output.metrics["clipped_share"].item() == pytest.approx(1 / 3)
    assert output.metrics["ratio_mean"].item() == pytest.approx(2.5 / 3)


def test_tis_by_hand():
    # The same terms, each response by its own length first.
    loss = tis(*hand(), ratio_cap=1.2).loss
    assert loss.item() == pytest.approx(-((1.2 * FIRST + 0.5 * SECOND) / 2 - 0.5 * SECOND) / 2)


def test_icepop_by_hand():
    # Only 1.5 lies in [.6, 5].
    output = icepop(*hand(), ratio_low=0.6, ratio_high=5.0)
    assert output.loss.item() == pytest.approx(-(1.5 * FIRST / 2) / 2)
    assert output.metrics["clipped_share"].item() == pytest.approx(2 / 3)


def test_m2po_by_hand():
    # (log rho)^2: .1644, .4805, .4805.  The mean of all is .375 and that of the first alone is
    # under .2; the other two are equal and go together.
    output = m2po(*hand(), tau=0.2)
    assert output.loss.item() == pytest.approx(-1.5 / 3)
    assert output.metrics["clipped_share"].item() == pytest.approx(2 / 3)
    # Under .4 all stay: (1.5 + .5 - .5) / 3.
    assert m2po(*hand(), tau=0.4).loss.item() == pytest.approx(-0.5)


def test_decoupled_ppo_by_hand():
    # Weights old / mu (2, 1) and 4, cut to 3; so u = pi / old: (.75, .5) and .125.
    # Sample 1, A = 1: 2 * .75 + 1 * .5 = 2.  Sample 2, A = -1: 3 * min(-.125, -.8) = -2.4.
    log_pi, log_mu, mask, reward = hand()
    log_old = log_mu + torch.tensor([[[2.0, 1.0], [4.0, 1.0]]], dtype=torch.float64).log()
    output = decoupled_ppo(log_pi, log_old, log_mu, mask, reward, clip_range=0.2, weight_cap=3.0)
    assert output.loss.item() == pytest.approx(0.4 / 3)
    assert output.metrics["clipped_share"].item() == pytest.approx(1 / 3)
    assert output.metrics["weight_mean"].item() == pytest.approx(2.0)  # (2 + 1 + 3) / 3
    assert output.metrics["ratio_mean"].item() == pytest.approx(1.375 / 3)


# Finite differences see through the stop-gradient on the weights, so that the gradient of CISPO,
# TIS and IcePop is held against its closed form instead.
@pytest.mark.parametrize(
    ("loss", "settings", "weight", "mean"),
    [
        (cispo, {"ratio_cap": 1.2}, lambda rho: min(rho, 1.2), "query"),
        (tis, {"ratio_cap": 1.2}, lambda rho: min(rho, 1.2), "sequence"),
        (
            icepop,
            {"ratio_low": 0.8, "ratio_high": 1.3},
            lambda rho: rho if 0.8 <= rho <= 1.3 else 0.0,
            "sequence",
        ),
    ],
    ids=["cispo", "tis", "icepop"],
)
def test_gradient_is_weight_times_advantage(loss, settings, weight, mean):
    inputs = batch()
    found = grad(loss(*_group(inputs), **settings).loss, inputs["log_pi"])
    torch.testing.assert_close(found, _closed_form(inputs, weight, mean))


def test_m2po_s_gradient_is_that_of_the_kept_ratios():
    inputs = batch()
    log_pi, log_mu, mask, _ = _group(inputs)
    kept = within_second_moment(log_pi - log_mu, mask, 0.02)
    found = grad(m2po(*_group(inputs), tau=0.02).loss, log_pi)
    expected = _closed_form(inputs, lambda rho: rho, "query").where(kept, 0.0)
    assert 0 < kept.sum() < mask.sum()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tau", [1e-3, 0.02, 0.05, 1.0])
def test_kept_tokens_are_the_most_whose_second_moment_is_under_tau(tau):
    # Slowly: drop the largest square until the mean of the rest is at most tau.
    inputs = batch()
    mask, log_rho = inputs["mask"], (inputs["log_pi"] - inputs["log_mu"]).detach()
    kept = within_second_moment(log_rho, mask, tau)
    for query in range(3):
        squares = sorted(log_rho[query][mask[query]].square().tolist())
        while squares and sum(squares) / len(squares) > tau:
            squares.pop()
        assert sorted(log_rho[query][kept[query]].square().tolist()) == squares


def test_a_query_without_a_token_under_tau_keeps_none_and_has_no_gradient():
    log_pi, log_mu, mask, reward = hand()
    log_pi.requires_grad_()
    output = m2po(log_pi, log_mu, mask, reward, tau=0.01)
    assert output.metrics["clipped_share"] == 1
    assert grad(output.loss, log_pi).abs().max() == 0


def test_cispo_and_tis_agree_on_responses_of_equal_length():
    inputs = batch() | {"mask": torch.ones(3, 4, 5, dtype=torch.bool)}
    torch.testing.assert_close(
        cispo(*_group(inputs), ratio_cap=1.2).loss, tis(*_group(inputs), ratio_cap=1.2).loss
    )


def test_loose_bounds_make_all_weights_the_ratio():
    inputs = batch()
    capped = grad(tis(*_group(inputs), ratio_cap=1e9).loss, inputs["log_pi"])
    banded = icepop(*_group(inputs), ratio_low=1e-9, ratio_high=1e9).loss
    torch.testing.assert_close(grad(banded, inputs["log_pi"]), capped)
    expected = _closed_form(inputs, lambda rho: rho, "sequence")
    torch.testing.assert_close(capped, expected)
    # d (rho A) = rho A d log pi: without a bound the plain ratio surrogate has the same gradient.
    plain = grad(m2po(*_group(inputs), tau=1e9).loss, inputs["log_pi"])
    weighted = grad(cispo(*_group(inputs), ratio_cap=1e9).loss, inputs["log_pi"])
    torch.testing.assert_close(plain, weighted)


def test_decoupled_ppo_anchored_at_the_sampler_is_ppo_s_clip():
    inputs = batch()
    log_pi, log_mu, mask, reward = _group(inputs)
    found = decoupled_ppo(log_pi, log_mu, log_mu, mask, reward, clip_range=0.2, weight_cap=5.0)
    rho = (log_pi - log_mu).exp()
    advantage = (reward - reward.mean(1, keepdim=True)).unsqueeze(-1)
    clip = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage) * mask
    torch.testing.assert_close(found.loss, -(clip.sum((1, 2)) / mask.sum((1, 2))).mean())
    assert found.metrics["weight_mean"].item() == pytest.approx(1.0)


def test_an_anchor_recomputed_from_the_same_weights_makes_the_clip_inert():
    inputs = batch()
    log_pi, log_mu, mask, reward = _group(inputs)
    found = decoupled_ppo(
        log_pi, log_pi.detach(), log_mu, mask, reward, clip_range=0.01, weight_cap=1e9
    )
    assert found.metrics["clipped_share"] == 0
    expected = grad(cispo(log_pi, log_mu, mask, reward, ratio_cap=1e9).loss, log_pi)
    torch.testing.assert_close(grad(found.loss, log_pi), expected)
