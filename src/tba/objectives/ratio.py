r"""The shared kernel of objectives with an importance ratio: ratios, surrogates, metrics.

    rho_t = pi(y_t) / anchor(y_t)                           ratio of a token
    clipped surrogate    min( rho A, clip(rho, 1 - low, 1 + high) A )
    weighted surrogate   sg[w] A log pi
    k3 = exp(-k1) + k1 - 1,  k1 = log pi - log ref          an estimate of KL(pi || ref), at least 0

Sources: "Proximal Policy Optimization Algorithms", arXiv 1707.06347 (clipped surrogate); Schulman,
"Approximating KL Divergence", 2020 (k3); section 5 of `docs/algorithm.md`.

The anchor is an argument: `log_mu`, the policy that sampled, or `log_old`, a policy some steps old.
An anchor recomputed from the weights being trained makes every ratio 1 and the method inert.

Detached: anchor, reference, advantages and the weights of weighted surrogates. What the anchors and
the padding hold never reaches the gradient: padding is replaced before any arithmetic.

How it differs from the papers: a ratio is bounded by e^20, beyond which its gradient is zero, so
that very stale samples overflow neither the loss nor its gradient.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.masked import log_ratio, mean_over_query_tokens

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before the exponential: e^20 is about 5e8."""


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the ratio, at most e^20."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def k3(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> Float[Tensor, "query sample token"]:
    """Return exp(-k1) + k1 - 1 with k1 = log pi - sg[log ref]: at least 0, and 0 at padding."""
    k1 = log_ratio(log_pi, log_ref, mask)
    return torch.expm1(-k1) + k1


def group_advantage(reward: Float[Tensor, "query sample"]) -> Float[Tensor, "query sample"]:
    """Return A = r - mean over the query's samples, detached."""
    reward = reward.detach().to(torch.promote_types(reward.dtype, torch.float32))
    return reward - reward.mean(dim=1, keepdim=True)


def scaled_group_advantage(
    reward: Float[Tensor, "query sample"], std_epsilon: float
) -> Float[Tensor, "query sample"]:
    """Return A / (std + std_epsilon), detached; 0 where the query has one sample.

    std is over the query's K samples and divides by K - 1, as in TRL.
    """
    advantage = group_advantage(reward)
    degrees = max(reward.shape[1] - 1, 1)  # K - 1
    std = (advantage.square().sum(dim=1, keepdim=True) / degrees).sqrt()
    return advantage / (std + std_epsilon)


def clipped_surrogate(
    ratio: Float[Tensor, "*shape"], advantage: Float[Tensor, "*#shape"], low: float, high: float
) -> Float[Tensor, "*shape"]:
    """Return min(rho A, clip(rho, 1 - low, 1 + high) A), to be maximised."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def is_clipped(
    ratio: Float[Tensor, "*shape"], advantage: Float[Tensor, "*#shape"], low: float, high: float
) -> Bool[Tensor, "*shape"]:
    """Return where the clipped surrogate is constant: the ratio has gone as far as A wants it."""
    above = (ratio > 1 + high) & (advantage > 0)
    below = (ratio < 1 - low) & (advantage < 0)
    return above | below


def taper(
    ratio: Float[Tensor, "*shape"], advantage: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """Return the weights of TOPR: 1 where A >= 0, else min(rho, 1), arXiv 2503.14286."""
    return torch.where(advantage < 0, ratio.clamp(max=1), 1.0)


def weighted_surrogate(
    weight: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*#shape"],
    log_pi: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return sg[w] A log pi, to be maximised: its gradient is w A grad log pi."""
    return weight.detach() * advantage * log_pi


def kl_metric(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> dict[str, Tensor]:
    """Return the mean over samples of log pi(y|x) - log ref(y|x), by its name."""
    return {"kl": log_ratio(log_pi.detach(), log_ref, mask).sum(dim=-1).mean()}


def token_ratio_metrics(
    ratio: Float[Tensor, "query sample token"],
    clipped: Bool[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> dict[str, Tensor]:
    """Return mean ratio and clipped share over the response tokens of a query, then queries."""
    ratio = ratio.detach()
    return {
        "ratio_mean": mean_over_query_tokens(ratio, mask),
        "clipped_share": mean_over_query_tokens(clipped.to(ratio.dtype), mask),
    }


def sequence_ratio_metrics(
    ratio: Float[Tensor, "query sample"], clipped: Bool[Tensor, "query sample"]
) -> dict[str, Tensor]:
    """Return mean ratio and clipped share over responses."""
    ratio = ratio.detach()
    return {"ratio_mean": ratio.mean(), "clipped_share": clipped.to(ratio.dtype).mean()}
