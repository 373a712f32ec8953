r"""Rewards, returns and advantages of single tokens: what the value-based objectives share.

    r_t = -beta k_t + [t is the last response token] reward        token rewards
    R_t = r_t + gamma R_{t+1}                                      Monte-Carlo return
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t = delta_t + gamma lambda A_{t+1}                           generalised advantage estimate

Sources: "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv
1506.02438; section 5 of `docs/algorithm.md`. V_t is the value of the state before token t, and the
state after the last token is worth 0. "Next" means the next *response* token: tokens in between
that the mask leaves out, such as padding, are passed over. Nothing here carries gradient.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.masked import at_responses

WHITEN_EPSILON = 1e-8
"""Added to the variance of whitened advantages, as in TRL."""


def reverse_scan(
    values: Float[Tensor, "query sample token"],
    decay: float | Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> Float[Tensor, "query sample token"]:
    """Return x_t = values_t + decay_t x_{t+1}, where x is passed on unchanged outside the mask."""
    steps = torch.where(mask, values, 0.0).unbind(dim=-1)
    decays = torch.where(mask, decay * torch.ones_like(values), 1.0).unbind(dim=-1)
    total = torch.zeros_like(steps[0])  # [query, sample]
    totals = []
    for step, by in zip(reversed(steps), reversed(decays), strict=True):
        total = step + by * total
        totals.append(total)
    return torch.stack(totals[::-1], dim=-1)


def next_value(
    value: Float[Tensor, "query sample token"], mask: Bool[Tensor, "query sample token"]
) -> Float[Tensor, "query sample token"]:
    """Return the value at the next response token, 0 after the last."""
    here_or_next = reverse_scan(value, 0.0, mask)
    return torch.cat([here_or_next[..., 1:], torch.zeros_like(value[..., :1])], dim=-1)


def token_rewards(
    log_k: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    beta: float,
) -> Float[Tensor, "query sample token"]:
    """Return -beta k at every response token, plus the reward at the last one; detached.

    Args:
        log_k: Log-ratio to the reference of the policy that pays for the KL term.
        mask: True at response tokens.
        reward: Raw rewards.
        beta: Strength of the KL term.
    """
    penalty = -beta * at_responses(log_k.detach(), mask)
    tokens_from_here = mask.int().flip(-1).cumsum(dim=-1).flip(-1)  # 1 at the last and after it
    is_last = mask & (tokens_from_here == 1)
    return penalty + torch.where(is_last, reward.detach().to(penalty.dtype).unsqueeze(-1), 0.0)


def generalised_advantage(
    token_reward: Float[Tensor, "query sample token"],
    value: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    *,
    discount: float,
    gae_lambda: float,
) -> Float[Tensor, "query sample token"]:
    """Return the generalised advantage estimate of each token, 0 at padding."""
    value = at_responses(value.detach(), mask)
    delta = token_reward + discount * next_value(value, mask) - value
    return torch.where(mask, reverse_scan(delta, discount * gae_lambda, mask), 0.0)


def whitened(
    values: Float[Tensor, "query sample token"], mask: Bool[Tensor, "query sample token"]
) -> Float[Tensor, "query sample token"]:
    """Return the values with mean 0 and std 1 over all response tokens, 0 at padding.

    The variance divides by the number of tokens less one, as in TRL.
    """
    tokens = mask.sum()
    mean = torch.where(mask, values, 0.0).sum() / tokens
    centred = torch.where(mask, values - mean, 0.0)
    variance = centred.square().sum() / (tokens - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + WHITEN_EPSILON)
