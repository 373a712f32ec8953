"""Attention with gradient on a CPU, as a transformers attention implementation.

On CPUs the backward pass of PyTorch's attention is several times slower in bfloat16 than in float32
when there are few queries for many keys, which is the shape of responses that follow a shared
prompt. And the heads that share keys and values are given a copy of them each. So, where gradients
are wanted, attention runs in float32, and the heads of a group become further queries to its keys.
Everything else is left to transformers' own "sdpa".
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "tba_grouped_sdpa"


def register_grouped_sdpa() -> str:
    """Make the implementation known to transformers and return its name."""
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
    return GROUPED_SDPA


def grouped_sdpa(
    module: nn.Module,
    query: Float[Tensor, "row head query width"],
    key: Float[Tensor, "row group key width"],
    value: Float[Tensor, "row group key width"],
    attention_mask: Bool[Tensor, "row 1 query key"] | None,
    **options: Any,
) -> tuple[Float[Tensor, "row query head width"], None]:
    """Attend as `sdpa_attention_forward` does, whose contract this is."""
    differentiable = torch.is_grad_enabled() and query.requires_grad
    if not differentiable or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    # head = group * share + member: [row, head, query, width] -> [row, group, member query, width]
    folded = query.reshape(rows, groups, heads // groups * queries, width)
    with torch.autocast(query.device.type, enabled=False):
        attended = scaled_dot_product_attention(
            folded.float(),
            key.float(),
            value.float(),
            attn_mask=attention_mask.repeat(1, 1, heads // groups, 1),
            scale=options.get("scaling"),
        )
    unfolded = attended.to(query.dtype).reshape(rows, heads, queries, value.shape[-1])
    return unfolded.transpose(1, 2).contiguous(), None
