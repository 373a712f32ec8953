"""Attention over blocks of packed tokens, by matrix products that share a prompt among its rows.

All is float32, whose products are as fast here as those of bfloat16. The samples of a query and the
heads of a group are folded into the rows of one product, so that no key is copied for any of them.
The backward pass computes the softmax again where it is large, so nothing of the size of all scores
is kept. GPUs have fused kernels for that, which want a copy of the prompt's keys for each row.

Axes: heads fall into `group`s that share keys and values, `member` is the place in such a group.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tba.policy.blocks import Block
from tba.policy.forward import to_device
from tba.records import Int64

_MOST_KEPT = 2**18
"""Weights of one layer that are kept for the backward pass (1 MiB); beyond, computing them again is
cheaper than the memory."""


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """A block in terms of one attention's heads, on the device.

    Vectors are rows of [token * head, width], or of [token * group, width] for keys and values.
    """

    sizes: tuple[int, int, int, int, int]
    """Prompts, groups of heads, rows of a prompt, members of a group, tokens of a row."""
    query: Tensor
    """[prompt, group, row, member, token], flattened."""
    padding: Tensor | None
    """Places in `query` that stand for no token; None: there is none."""
    own: Tensor
    """[prompt, group, row, own], flattened."""
    prefix: Tensor | None
    """[prompt, group, prefix], flattened; None: there is no prompt before these rows."""
    bias: Tensor
    """Zero or minus infinity; [1, member * token, own]."""
    hidden: Tensor | None
    """[prompt, 1, token or 1, prefix]; None: all tokens see all of their prompt."""

    def rows_of(self, vectors: Tensor) -> Tensor:
        """Return a copy of the block's [prompt * group * row * member * token, width]."""
        return vectors.index_select(0, self.query)

    def keys_of(self, vectors: Tensor) -> "_Keys":
        """Return copies of what the block attends to."""
        prompts, groups, rows, _, _ = self.sizes
        width = vectors.shape[1]
        own = vectors.index_select(0, self.own).view(prompts * groups * rows, -1, width)
        if self.prefix is None:
            return _Keys(own, None)
        prefix = vectors.index_select(0, self.prefix)
        return _Keys(own, prefix.view(prompts * groups, -1, width))

    def by_row(self, rows: Tensor) -> Tensor:
        """View as [prompt * group * row, member * token, width]."""
        return rows.view(math.prod(self.sizes[:3]), -1, rows.shape[-1])

    def by_prompt(self, rows: Tensor) -> Tensor:
        """View as [prompt * group, row * member * token, width]."""
        return rows.view(math.prod(self.sizes[:2]), -1, rows.shape[-1])


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys or values of a block."""

    own: Tensor
    """[prompt * group * row, own, width]."""
    prefix: Tensor | None
    """[prompt * group, prefix, width]."""


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """All blocks of a pass in terms of one attention's heads."""

    blocks: list[BlockIndex]
    slot: Tensor
    """Place of each [token, head] in the blocks' results, one after the other; flattened."""

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """Put the blocks' results, each [slot, width], into the order of the tokens."""
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together.index_select(0, self.slot)


def index_blocks(
    blocks: list[Block],
    *,
    tokens: int,
    heads: int,
    groups: int,
    window: int | None,
    device: torch.device,
) -> AttentionIndex:
    """Return the blocks in terms of vectors of a head."""
    slot = np.empty(tokens * heads, dtype=np.int64)
    known = 0
    indexed = []
    for block in blocks:
        members = heads // groups
        group, member = np.arange(groups), np.arange(members)
        # [prompt, row, token] -> [prompt, group, row, member, token]
        head = group[:, None, None, None] * members + member[:, None]
        query = block.token[:, None, :, None, :] * heads + head
        real = np.broadcast_to(block.real[:, None, :, None, :], query.shape).ravel()
        slot[query.ravel()[real]] = known + np.flatnonzero(real)
        known += query.size
        bias = np.where(block.hidden_own(window), -np.inf, 0.0).astype(np.float32)
        hidden = block.hidden_prefix(window)
        indexed.append(
            BlockIndex(
                sizes=tuple(query.shape),
                query=to_device(query.ravel(), device),
                padding=None if real.all() else to_device(np.flatnonzero(~real), device),
                own=to_device(_of_groups(block.own, group[:, None, None]), device),
                prefix=to_device(_of_groups(block.prefix, group[:, None]), device)
                if block.prefix.size
                else None,
                bias=to_device(np.tile(bias, (members, 1))[None], device),
                hidden=None if hidden is None else to_device(hidden[:, None], device),
            )
        )
    return AttentionIndex(indexed, to_device(slot, device))


def _of_groups(token: Int64, group: Int64) -> NDArray[np.int64]:
    """Return the vectors of tokens in each group: [prompt, ...] -> [prompt, group, ...], flat."""
    return (token[:, None] * group.size + group).ravel()


def attend_in_blocks(
    query: Float[Tensor, "vector width"],
    key: Float[Tensor, "key width"],
    value: Float[Tensor, "key width"],
    index: AttentionIndex,
    scale: float,
) -> Float[Tensor, "vector width"]:
    """Attend; vectors are those of [token, head] and keys those of [token, group]."""
    if _has_fused_kernels(query.device):
        return index.in_order([_fused(block, query, key, value, scale) for block in index.blocks])
    with torch.autocast(query.device.type, enabled=False):
        attended: Tensor = _Attention.apply(query, key, value, index, scale)  # type: ignore[no-untyped-call]
        return attended


def _has_fused_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def _fused(block: BlockIndex, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend in a block by torch's own kernel; return [slot, width]."""
    prompts, groups, rows, members, tokens = block.sizes

    def of_rows(vectors: Tensor) -> Tensor:  # [prompt * group, row * member, prefix + own, width]
        keys = block.keys_of(vectors)
        found = keys.own.view(prompts * groups, rows, -1, vectors.shape[1])
        if keys.prefix is not None:
            prefix = keys.prefix[:, None].expand(-1, rows, -1, -1)
            found = torch.cat([prefix, found], dim=2)
        return found.repeat_interleave(members, dim=1)

    bias = block.bias[:, None, :tokens]  # [1, 1, token, own]
    if block.prefix is not None:
        width = block.prefix.numel() // (prompts * groups)
        before = bias.new_zeros(prompts, 1, tokens, width)
        if block.hidden is not None:
            before = before.masked_fill(block.hidden, -torch.inf)
        bias = torch.cat([before, bias.expand(prompts, -1, -1, -1)], dim=-1)
        bias = bias.repeat_interleave(groups, dim=0)
    attended = functional.scaled_dot_product_attention(
        block.rows_of(query).view(prompts * groups, rows * members, tokens, -1),
        of_rows(key),
        of_rows(value),
        attn_mask=bias.to(query.dtype),
        scale=scale,
    )
    return attended.reshape(-1, query.shape[1])


class _Attention(torch.autograd.Function):
    """Forward and backward pass over all blocks."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, index: AttentionIndex, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.index, ctx.scale = index, scale
        queries, keys, values = query.float() * scale, key.float(), value.float()
        parts = []
        ctx.weights = [None] * len(index.blocks)
        kept = 0
        for number, block in enumerate(index.blocks):
            weights = _softmax(block, block.rows_of(queries), block.keys_of(keys))
            parts.append(_weighted(block, weights, block.keys_of(values)))
            if kept + weights.numel() <= _MOST_KEPT:
                kept += weights.numel()
                ctx.weights[number] = weights
        return index.in_order(parts).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            queries, keys, values = query.float() * ctx.scale, key.float(), value.float()
            above = gradient.float()
            of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
            parts = []
            for block, weights in zip(ctx.index.blocks, ctx.weights, strict=True):
                own = block.rows_of(above)
                if block.padding is not None:
                    own.index_fill_(0, block.padding, 0.0)
                rows, seen = block.rows_of(queries), block.keys_of(keys)
                if weights is None:
                    weights = _softmax(block, rows, seen)
                _add_weighted(block, of_value, weights, own)
                of_weights = _products(block, own, block.keys_of(values))
                of_scores = torch.ops.aten._softmax_backward_data(
                    of_weights, weights, -1, torch.float32
                )
                _add_weighted(block, of_key, of_scores, rows)
                parts.append(_weighted(block, of_scores, seen))
            of_query = ctx.index.in_order(parts).mul_(ctx.scale)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _products(block: BlockIndex, rows: Tensor, keys: _Keys) -> Tensor:
    """Return the inner products of rows with what they attend to, the prompt's tokens first.

    Its shape is [prompt * group * row, member * token, prefix + own].
    """
    right = torch.bmm(block.by_row(rows), keys.own.mT)
    if keys.prefix is None:
        return right
    left = torch.bmm(block.by_prompt(rows), keys.prefix.mT)
    return torch.cat([left.view(*right.shape[:2], -1), right], dim=-1)


def _softmax(block: BlockIndex, rows: Tensor, keys: _Keys) -> Tensor:
    """Return how much of each token goes to which, shaped as by `_products`."""
    scores = _products(block, rows, keys)
    own = keys.own.shape[1]
    scores[..., -own:] += block.bias
    if block.hidden is not None:
        # [prompt * group * row, member * token, :] -> [prompt, group * row * member, token, :]
        prompts, _, _, _, tokens = block.sizes
        of_prefix = scores.view(prompts, -1, tokens, scores.shape[-1])[..., :-own]
        of_prefix.masked_fill_(block.hidden, -torch.inf)
    return scores.softmax(dim=-1)


def _weighted(block: BlockIndex, weights: Tensor, keys: _Keys) -> Tensor:
    """Return the weighted sums of keys, as [slot, width]."""
    own = keys.own.shape[1]
    sums = torch.bmm(weights[..., -own:], keys.own)
    if keys.prefix is not None:
        by_prompt = weights.view(len(keys.prefix), -1, weights.shape[-1])
        block.by_prompt(sums).baddbmm_(by_prompt[..., :-own], keys.prefix)
    return sums.flatten(0, 1)


def _add_weighted(block: BlockIndex, total: Tensor, weights: Tensor, rows: Tensor) -> None:
    """Add to every key the weighted sum of the rows that attend to it."""
    own = block.bias.shape[-1]
    of_own = torch.bmm(weights[..., -own:].mT, block.by_row(rows))
    total.index_add_(0, block.own, of_own.flatten(0, 1))
    if block.prefix is not None:
        above = block.by_prompt(rows)
        by_prompt = weights.view(len(above), -1, weights.shape[-1])
        of_prefix = torch.bmm(by_prompt[..., :-own].mT, above)
        total.index_add_(0, block.prefix, of_prefix.flatten(0, 1))
