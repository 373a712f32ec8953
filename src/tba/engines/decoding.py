"""Rows that continue prompts, one token a forward pass: their keys, values and attention.

    prompt keys and values   [group, query, key, width], one copy for all samples of a query
    own keys and values      [group, row, token, width], room for the longest response

A new token attends to both at once, under one softmax. The samples of a query, and the heads of a
group, are queries to one matrix of prompt keys, so these are read once for all of them; with groups
in front, they lie side by side as they are. On CPUs both parts are held and computed in float32, in
which many small products are quicker than in bfloat16. On GPUs what is read of the rows' own room
grows by whole blocks, so that one recorded pass serves many tokens; what is not yet written is
masked.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba.policy.forward import to_device
from tba.policy.packed import PromptPass

_BLOCK_ON_GPU = 64
"""Tokens by which the part of the own room that is read grows on a GPU."""


@dataclass(slots=True)
class _Layer:
    """What one layer holds."""

    prompt_keys: Float[Tensor, "group query key width"]
    prompt_values: Float[Tensor, "group query key width"]
    keys: Float[Tensor, "group row token width"]
    values: Float[Tensor, "group row token width"]

    def keep(self, rows: Int[Tensor, " row"], held: int) -> None:
        """Move some rows' own tokens to the front of the room, without gaps."""
        self.keys, self.values = (_kept(full, rows, held) for full in (self.keys, self.values))


def _kept(full: Tensor, rows: Int[Tensor, " row"], held: int) -> Tensor:
    """Return the front of a room [group, row, token, width], laid out anew for some rows."""
    groups, _, *rest = full.shape
    own = full[:, :, :held].index_select(1, rows)
    shape = (groups, len(rows), *rest)
    front = full.flatten()[: math.prod(shape)].view(shape)
    front[:, :, :held] = own
    return front


class DecodingSequences:
    """The `tba.policy.attention.Sequences` of passes that append one token to each row."""

    def __init__(
        self, prefix: PromptPass, samples: int, room: int, *, block: int | None = None
    ) -> None:
        """Let `samples` rows continue each prompt by up to `room` tokens.

        Args:
            prefix: What was computed of the prompts.
            samples: Rows of each prompt.
            room: Tokens that a row may append.
            block: Tokens by which what is read grows; by default what suits the device.
        """
        device = prefix.states.device
        self._block = block or (_BLOCK_ON_GPU if device.type == "cuda" else 1)
        self._room = -(-room // self._block) * self._block
        lengths = np.diff(prefix.starts)
        self._queries, self._longest = len(lengths), int(lengths.max())
        at = prefix.starts[:-1, None] + np.minimum(np.arange(self._longest), lengths[:, None] - 1)
        at = to_device(at.reshape(-1), device)  # padding repeats the last token
        self._layers = [
            self._layer(keys, values, at, samples)
            for keys, values in zip(prefix.keys, prefix.values, strict=True)
        ]
        self._ragged = bool(lengths.min() < self._longest)
        self._samples = samples  # places of each query when rows are padded by query
        self._place: Int[Tensor, " row"] | None = None  # None: every place has its row
        self._row_at: Int[Tensor, " place"] | None = None
        self._query = to_device(np.repeat(np.arange(self._queries), samples), device)
        self._prompt_lengths = to_device(np.repeat(lengths, samples), device)
        self._held = 0  # own tokens that each row holds
        self._next = torch.zeros(1, dtype=torch.long, device=device)  # the same, for the device
        self._masks: dict[int | None, Float[Tensor, "row 1 key"] | None] = {}  # by window

    @property
    def visible(self) -> int:
        """Own tokens that a pass reads; passes with as many rows and of these are alike."""
        return (self._held // self._block + 1) * self._block

    def positions(self) -> Int[Tensor, "1 row"]:
        """Begin a pass: return the position of the token to come in each row."""
        self._masks.clear()
        return (self._prompt_lengths + self._next).unsqueeze(0)

    def end_pass(self) -> None:
        """Count on the device the token that a pass has appended."""
        self._next += 1

    def advance(self) -> None:
        """Count the token that a pass has appended."""
        self._held += 1

    def keep(self, rows: Int[Tensor, " row"]) -> None:
        """Drop all rows but the given ones, in increasing order; waits for the device."""
        self._query, self._prompt_lengths = self._query[rows], self._prompt_lengths[rows]
        count = torch.bincount(self._query, minlength=self._queries)
        self._samples = int(count.max())
        rank = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[self._query]
        self._place = self._query * self._samples + rank
        places = rank.new_zeros(self._queries * self._samples)  # a place without a row has any
        self._row_at = places.index_copy_(
            0, self._place, torch.arange(len(rows), device=rank.device)
        )
        for layer in self._layers:
            layer.keep(rows, self._held)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 head row width"],
        key: Float[Tensor, "1 group row width"],
        value: Float[Tensor, "1 group row width"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 row head width"]:
        """Append the new keys and values and attend to all there are."""
        held = self._layers[layer]
        self._append(held.keys, key[0])
        self._append(held.values, value[0])
        keys, values = (full[:, :, : self.visible] for full in (held.keys, held.values))
        # [group, member, row, width] -> [group, row, member, width]
        asked = query[0].unflatten(0, (len(keys), -1)).transpose(1, 2)
        asked = asked.to(keys.dtype, copy=True, memory_format=torch.contiguous_format).mul_(scale)
        of_prompt = self._by_row(self._by_query(asked) @ held.prompt_keys.mT, asked.shape[2])
        scores = torch.cat([of_prompt, asked @ keys.mT], dim=-1)
        if (mask := self._mask(window, scores.dtype)) is not None:
            scores += mask
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        on_prompt, on_own = weights.split([self._longest, self.visible], dim=-1)
        attended = self._by_row(self._by_query(on_prompt) @ held.prompt_values, asked.shape[2])
        attended = (attended + on_own @ values).to(query.dtype)
        # [group, row, member, width] -> [1, row, head, width]
        return attended.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _append(
        self, room: Float[Tensor, "group row token width"], new: Float[Tensor, "group row width"]
    ) -> None:
        if self._block == 1:
            room[:, :, self._held] = new
        else:  # at a place that a recording does not fix
            room.index_copy_(2, self._next, new.unsqueeze(2).to(room.dtype))

    def _layer(
        self,
        keys: Float[Tensor, "group token width"],
        values: Float[Tensor, "group token width"],
        at: Int[Tensor, " query_key"],
        samples: int,
    ) -> _Layer:
        """Unpack a layer's prompts and make room for the rows' own tokens."""
        dtype = torch.float32 if keys.device.type == "cpu" else keys.dtype
        parts = [keys.to(dtype), values.to(dtype)]
        prompts = [part.index_select(1, at).unflatten(1, (self._queries, -1)) for part in parts]
        shape = (len(keys), self._queries * samples, self._room)
        own = [part.new_zeros(*shape, part.shape[-1]) for part in parts]
        return _Layer(*prompts, *own)

    def _by_query(self, rows: Float[Tensor, "group row member x"]) -> Float[Tensor, "group q m x"]:
        """Gather rows by query: all members of all its samples side by side, m of them."""
        if self._row_at is not None:
            rows = rows.index_select(1, self._row_at)
        return rows.unflatten(1, (self._queries, -1)).flatten(2, 3)

    def _by_row(self, by_query: Float[Tensor, "group q m x"], members: int) -> Tensor:
        """Undo `_by_query`."""
        rows = by_query.unflatten(2, (-1, members)).flatten(1, 2)
        return rows if self._place is None else rows.index_select(1, self._place)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "row 1 key"] | None:
        """Return what hides keys from rows, None for nothing; made once for a pass."""
        if window not in self._masks:
            near = window is None or self._longest + self.visible < window
            plain = near and not self._ragged and self._block == 1
            self._masks[window] = None if plain else self._hidden(window, dtype)
        return self._masks[window]

    def _hidden(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "row 1 key"]:
        device = self._query.device
        lengths = self._prompt_lengths[:, None]
        of_prompt = torch.arange(self._longest, device=device).expand(len(lengths), -1)
        own = lengths + torch.arange(self.visible, device=device)  # positions, [row, token]
        newest = lengths + self._next
        hidden = torch.cat([of_prompt >= lengths, own > newest], dim=1)
        if window is not None:
            hidden |= torch.cat([of_prompt, own], dim=1) <= newest - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return bias.masked_fill_(hidden, float("-inf")).unsqueeze(1)
