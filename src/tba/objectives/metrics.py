"""Figures of the rewards, and of the distance between a policy and those that sampled.

All are means over queries or numbers of single ones, so the value of a batch is the mean of those
of its micro-batches.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.masked import log_ratio


def reward_metrics(
    reward: Float[Tensor, "query sample"], kl: Float[Tensor, "query sample"] | None = None
) -> dict[str, Tensor]:
    """Return what the rewards, and the KL if there is one, say about the batch; no gradient.

    Args:
        reward: Raw rewards.
        kl: log pi - log ref of each response, summed over its tokens.
    """
    reward = reward.detach().to(torch.promote_types(reward.dtype, torch.float32))
    equal = (reward == reward[:, :1]).all(dim=1)  # such queries teach nothing but the KL term
    metrics = {
        "reward_mean": reward.mean(),
        "reward_std": reward.std(dim=1, correction=0).mean(),
        "equal_reward_share": equal.to(reward.dtype).mean(),
    }
    return metrics if kl is None else {"kl": kl.detach().mean(), **metrics}


def distance_to_sampling(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> dict[str, Float[Tensor, " query"]]:
    """Return how far the policy is from those that sampled, for each query; no gradient.

    `log_prob_mismatch` is |log pi - log mu| a token; `effective_sample_share` is (sum w)^2 /
    (K sum w^2) with w = pi(y|x) / mu(y|x).
    """
    log_rho = log_ratio(log_pi.detach(), log_mu, mask)
    weight = torch.softmax(log_rho.sum(dim=-1), dim=-1)  # [query, sample]
    return {
        "log_prob_mismatch": log_rho.abs().sum((1, 2)) / mask.sum((1, 2)),
        "effective_sample_share": 1 / (weight.square().sum(dim=-1) * weight.shape[-1]),
    }
