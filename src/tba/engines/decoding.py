"""Rows that continue prompts, one token a forward pass: their keys, values and attention.

    prompt keys and values   [query, group, key, width], one copy for all samples of a query
    own keys and values      [row, group, token, width], room for the longest response

A new token attends to both at once, under one softmax. The samples of a query, and the heads of a
group, are queries to one matrix of prompt keys, so these are read once for all of them. On CPUs
both parts are held and computed in float32, in which many small products are quicker than in
bfloat16. On GPUs what is read of the rows' own room grows by whole blocks, so that one recorded
pass serves many tokens; what is not yet written is masked.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.policy.forward import to_device
from tba.policy.packed import PromptPass

_BLOCK_ON_GPU = 64
"""Tokens by which the part of the own room that is read grows on a GPU."""


@dataclass(slots=True)
class _Layer:
    """What one layer holds."""

    prompt_keys: Float[Tensor, "query group key width"]
    prompt_values: Float[Tensor, "query group key width"]
    keys: Float[Tensor, "row group token width"]
    values: Float[Tensor, "row group token width"]

    def keep(self, rows: Int[Tensor, " row"], held: int) -> None:
        """Move some rows' own tokens to the front."""
        for full in (self.keys, self.values):
            full[: len(rows), :, :held] = full[:, :, :held].index_select(0, rows)
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]


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
        self._query = to_device(np.repeat(np.arange(self._queries), samples), device)
        self._prompt_lengths = to_device(np.repeat(lengths, samples), device)
        self._held = 0  # own tokens that each row holds
        self._next = torch.zeros(1, dtype=torch.long, device=device)  # the same, for the device
        self._masks: dict[int | None, Bool[Tensor, "row 1 1 key"] | None] = {}  # by window

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
        for full, new in ((held.keys, key), (held.values, value)):
            full.index_copy_(2, self._next, new[0].transpose(0, 1).unsqueeze(2).to(full.dtype))
        own = slice(self.visible)
        # [1, group member, row, width] -> [row, group, member, width]
        asked = query[0].unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3).to(held.keys.dtype)
        asked = asked * scale
        members = asked.shape[2]
        of_prompt = self._by_row(self._by_query(asked) @ held.prompt_keys.mT, members)
        scores = torch.cat([of_prompt, asked @ held.keys[:, :, own].mT], dim=-1)
        if (mask := self._mask(window)) is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(held.values.dtype)
        on_prompt, on_own = weights.split([self._longest, self.visible], dim=-1)
        attended = self._by_row(self._by_query(on_prompt) @ held.prompt_values, members)
        attended = attended + on_own @ held.values[:, :, own]
        return attended.to(query.dtype).reshape(1, len(asked), -1, value.shape[-1])

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
        prompts = [
            part.index_select(1, at).unflatten(1, (self._queries, -1)).transpose(0, 1).contiguous()
            for part in parts
        ]
        shape = (self._queries * samples, len(keys), self._room)
        own = [part.new_zeros(*shape, part.shape[-1]) for part in parts]
        return _Layer(*prompts, *own)

    def _by_query(self, rows: Float[Tensor, "row group member x"]) -> Float[Tensor, "q group m x"]:
        """Gather rows by query: all members of all its samples side by side, m of them."""
        if self._place is not None:
            padded = rows.new_zeros(self._queries * self._samples, *rows.shape[1:])
            rows = padded.index_copy_(0, self._place, rows)
        by_query = rows.unflatten(0, (self._queries, -1)).transpose(1, 2)
        return by_query.flatten(2, 3)

    def _by_row(self, by_query: Float[Tensor, "q group m x"], members: int) -> Tensor:
        """Undo `_by_query`."""
        rows = by_query.unflatten(2, (-1, members)).transpose(1, 2).flatten(0, 1)
        return rows if self._place is None else rows.index_select(0, self._place)

    def _mask(self, window: int | None) -> Bool[Tensor, "row 1 1 key"] | None:
        """Return which keys each row sees, None for all; made once for all layers of a pass."""
        if window not in self._masks:
            near = window is None or self._longest + self.visible < window
            plain = near and not self._ragged and self._block == 1
            self._masks[window] = None if plain else self._seen(window)
        return self._masks[window]

    def _seen(self, window: int | None) -> Bool[Tensor, "row 1 1 key"]:
        device = self._query.device
        lengths = self._prompt_lengths[:, None]
        of_prompt = torch.arange(self._longest, device=device).expand(len(lengths), -1)
        own = lengths + torch.arange(self.visible, device=device)  # positions, [row, token]
        newest = lengths + self._next
        seen = torch.cat([of_prompt < lengths, own <= newest], dim=1)
        if window is not None:
            seen &= torch.cat([of_prompt, own], dim=1) > newest - window
        return seen[:, None, None, :]
