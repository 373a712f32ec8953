"""Arithmetic on ragged responses: what padding holds reaches neither a value nor a gradient.

All objectives share it. Log-probabilities are computed with in at least float32.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def at_responses(
    values: Float[Tensor, "query sample token"], mask: Bool[Tensor, "query sample token"]
) -> Float[Tensor, "query sample token"]:
    """Return the values in at least float32, and 0 at padding whatever that holds."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.where(mask, values.to(dtype), 0.0)


def log_ratio(
    log_pi: Float[Tensor, "query sample token"],
    anchor: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> Float[Tensor, "query sample token"]:
    """Return log pi - sg[log anchor], 0 at padding."""
    return at_responses(log_pi, mask) - at_responses(anchor.detach(), mask)


def mean_over_sequences(
    values: Float[Tensor, "query sample token"], mask: Bool[Tensor, "query sample token"]
) -> Float[Tensor, ""]:
    """Return the mean over the tokens of each response, then over responses and queries."""
    tokens = mask.sum(dim=-1).clamp(min=1)  # |y|, [query, sample]
    return (torch.where(mask, values, 0.0).sum(dim=-1) / tokens).mean()


def mean_over_query_tokens(
    values: Float[Tensor, "query sample token"], mask: Bool[Tensor, "query sample token"]
) -> Float[Tensor, ""]:
    """Return the mean over all response tokens of each query, then over queries."""
    tokens = mask.sum(dim=(1, 2)).clamp(min=1)  # [query]
    return (torch.where(mask, values, 0.0).sum(dim=(1, 2)) / tokens).mean()


def sum_over_tokens(
    values: Float[Tensor, "query sample token"], mask: Bool[Tensor, "query sample token"]
) -> Float[Tensor, ""]:
    """Return the sum over the tokens of each response, then the mean over responses and queries."""
    return torch.where(mask, values, 0.0).sum(dim=-1).mean()
