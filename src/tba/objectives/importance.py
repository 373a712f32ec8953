r"""Objectives that bound importance ratios by other means than PPO's clip.

    A_j = r_j - mean_i r_i;   rho_t = pi(y_t) / mu(y_t);   one loss term a token:

    CISPO           -sg[min(rho_t, cap)] A_j log pi(y_t)               arXiv 2506.13585 (MiniMax-M1)
    TIS (AIPO)      -sg[min(rho_t, cap)] A_j log pi(y_t)               arXiv 2505.24034 (LlamaRL)
    IcePop          -sg[rho_t] A_j log pi(y_t) if low <= rho_t <= high, else 0      arXiv 2510.18855
    M2PO            -rho_t A_j unless masked: the tokens of largest |log rho| are masked until the
                    mean of (log rho)^2 over the others is at most tau              arXiv 2510.01161
    decoupled PPO   -sg[min(w_t, cap)] min(u_t A_j, clip(u_t, 1 +- eps) A_j)        arXiv 2505.24298
                    w_t = old(y_t) / mu(y_t),  u_t = pi(y_t) / old(y_t)

The anchor is `log_mu`, the policy that sampled; in decoupled PPO the clip is anchored at `log_old`,
a policy some steps old, and `log_mu` only corrects for having sampled from another. Detached:
anchors, advantages and the weights sg[.]. CISPO and TIS bound the same weight and differ in the
mean: over all tokens of a query (long responses count more), or over each response and then over
responses. M2PO and decoupled PPO take the first mean, IcePop the second.

How they differ from the papers: A is not divided by the standard deviation. The token mean is
over a query, not over the batch, and so is M2PO's second moment: queries do not mix, and
micro-batches of whole queries are exact. Tokens with equal |log rho| are masked together in M2PO,
so that their order does not matter. CISPO has no lower bound, as the paper runs it. IcePop has one
ratio, pi / mu: the paper applies its band to the mismatch of two engines with the same weights and
PPO's clip to what the weights moved since. The cap of decoupled PPO's weight is not in the paper;
its public code drops tokens above a cap, here the weight is cut to it.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import (
    at_responses,
    log_ratio,
    mean_over_query_tokens,
    mean_over_sequences,
)
from tba.objectives.metrics import reward_metrics
from tba.objectives.ratio import (
    bounded_exp,
    clipped_surrogate,
    group_advantage,
    is_clipped,
    token_ratio_metrics,
    weighted_surrogate,
)


def cispo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    ratio_cap: float,
) -> ObjectiveOutput:
    """Return the CISPO loss, anchored at `log_mu`, a mean over all tokens of each query.

    Args:
        log_pi: Log-probabilities under the policy being trained; the only input with gradient.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        ratio_cap: Largest weight of a token.
    """
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    weight, cut = ratio.clamp(max=ratio_cap), ratio > ratio_cap
    return _weighted(log_pi, mask, reward, ratio, weight, cut, mean=mean_over_query_tokens)


def tis(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    ratio_cap: float,
) -> ObjectiveOutput:
    """Return the loss with truncated importance sampling (AIPO), anchored at `log_mu`.

    Args:
        log_pi: Log-probabilities under the policy being trained; the only input with gradient.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        ratio_cap: Largest weight of a token.
    """
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    weight, cut = ratio.clamp(max=ratio_cap), ratio > ratio_cap
    return _weighted(log_pi, mask, reward, ratio, weight, cut, mean=mean_over_sequences)


def icepop(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    ratio_low: float,
    ratio_high: float,
) -> ObjectiveOutput:
    """Return the IcePop loss, anchored at `log_mu`; tokens outside the band count as zero.

    Args:
        log_pi: Log-probabilities under the policy being trained; the only input with gradient.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        ratio_low: Smallest ratio of a token that is kept.
        ratio_high: Largest ratio of a token that is kept.
    """
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    outside = (ratio < ratio_low) | (ratio > ratio_high)
    weight = torch.where(outside, 0.0, ratio)
    return _weighted(log_pi, mask, reward, ratio, weight, outside, mean=mean_over_sequences)


def _weighted(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    ratio: Float[Tensor, "query sample token"],
    weight: Float[Tensor, "query sample token"],
    limited: Bool[Tensor, "query sample token"],
    *,
    mean: Callable[[Tensor, Tensor], Tensor],
) -> ObjectiveOutput:
    """Return the mean of -sg[w] A log pi: each token with a weight made of its ratio.

    `limited` says at which tokens the weight is not the ratio.
    """
    advantage = group_advantage(reward).unsqueeze(-1)
    surrogate = weighted_surrogate(weight, advantage, at_responses(log_pi, mask))
    metrics = reward_metrics(reward) | token_ratio_metrics(ratio, limited, mask)
    return ObjectiveOutput(loss=mean(-surrogate, mask), metrics=metrics)


def within_second_moment(
    log_rho: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    tau: float,
) -> Bool[Tensor, "query sample token"]:
    """Return the tokens left when the mean of (log rho)^2 over a query's tokens is at most tau.

    The largest squares go first, equal ones together.
    """
    square = torch.where(mask, log_rho.detach().square(), torch.inf)
    ascending = square.flatten(1).sort(dim=1).values  # [query, sample * token]; padding comes last
    count = torch.arange(1, ascending.shape[1] + 1, device=square.device)
    kept = (ascending.cumsum(dim=1) / count <= tau).sum(dim=1, keepdim=True)  # means never fall
    bounds = torch.cat([ascending, torch.full_like(ascending[:, :1], torch.inf)], dim=1)
    first_masked = bounds.gather(1, kept).unsqueeze(-1)  # [query, 1, 1]
    return mask & (square < first_masked)


def m2po(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    tau: float,
) -> ObjectiveOutput:
    """Return the M2PO loss, anchored at `log_mu`; masked tokens still count in the mean.

    Args:
        log_pi: Log-probabilities under the policy being trained; the only input with gradient.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        tau: Largest mean of (log rho)^2 over the tokens of a query that are kept.
    """
    advantage = group_advantage(reward).unsqueeze(-1)
    log_rho = log_ratio(log_pi, log_mu, mask)
    kept = within_second_moment(log_rho, mask, tau)
    surrogate = bounded_exp(torch.where(kept, log_rho, 0.0)) * advantage
    loss = mean_over_query_tokens(torch.where(kept, -surrogate, 0.0), mask)
    metrics = reward_metrics(reward) | token_ratio_metrics(bounded_exp(log_rho), ~kept, mask)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def decoupled_ppo(
    log_pi: Float[Tensor, "query sample token"],
    log_old: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    clip_range: float,
    weight_cap: float,
) -> ObjectiveOutput:
    """Return the decoupled PPO loss: clipped around `log_old`, weighted for `log_mu`.

    Args:
        log_pi: Log-probabilities under the policy being trained; the only input with gradient.
        log_old: The same under a policy some steps old: the anchor of the clipped ratio.
        log_mu: The same under the policy that sampled: the anchor of the weight.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        clip_range: The ratio to `log_old` counts up to 1 +- this.
        weight_cap: Largest weight of a token.
    """
    advantage = group_advantage(reward).unsqueeze(-1)
    ratio = bounded_exp(log_ratio(log_pi, log_old, mask))
    weight = bounded_exp(log_ratio(log_old.detach(), log_mu, mask)).clamp(max=weight_cap)
    surrogate = weight * clipped_surrogate(ratio, advantage, clip_range, clip_range)
    loss = mean_over_query_tokens(-surrogate, mask)
    clipped = is_clipped(ratio, advantage, clip_range, clip_range)
    metrics = (
        reward_metrics(reward)
        | token_ratio_metrics(ratio, clipped, mask)
        | {"weight_mean": mean_over_query_tokens(weight, mask)}
    )
    return ObjectiveOutput(loss=loss, metrics=metrics)
