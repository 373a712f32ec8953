"""Scalars that every objective reports: the KL to the reference and the rewards.

All are means over queries, so the value of a batch is the mean of those of its micro-batches.
"""

import torch
from jaxtyping import Float
from torch import Tensor


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
