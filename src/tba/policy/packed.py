"""One forward pass over packed tokens: each prompt once, then each response's inputs, no padding.

    prompt 0 | prompt 1 | ... | row 0 | row 1 | ...      one row of tokens, [1, token]

The inputs of a response are its tokens but the last, which predicts nothing. A response attends to
its query's prompt and to itself, so the prompt of a query is computed once for all its samples, and
the gradient of all of them flows through its keys and values. Nothing is cached, so gradient
checkpointing, autocast and adapters work as in any forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tba.policy.block_attention import AttentionIndex, attend_in_blocks, index_blocks
from tba.policy.blocks import Group, plan_blocks
from tba.policy.forward import packed_states, to_device
from tba.records import Int32, Int64

_OVERHEAD = {"cpu": 2**14, "cuda": 2**20}
"""What one more block costs, in scores of one head."""


class PackedSequences:
    """Prompts with the responses that follow them; a `tba.policy.attention.Sequences`."""

    def __init__(
        self,
        prompts: Sequence[Int32],
        inputs: Sequence[Int32],
        query_of_row: Int64,
        device: torch.device,
    ) -> None:
        """Lay out prompts and, behind them, the inputs of each row, some perhaps empty."""
        of_prompts, of_rows = (
            np.array([len(part) for part in parts], dtype=np.int64) for parts in (prompts, inputs)
        )
        ends = np.cumsum([*of_prompts, *of_rows])
        self.prompt_end: Int64 = ends[: len(prompts)]
        """Shape [query]."""
        prompt_start = self.prompt_end - of_prompts
        row_start = ends[len(prompts) :] - of_rows
        self.tokens = int(ends[-1])
        """Number of all tokens."""
        before = np.concatenate([prompt_start, row_start - of_prompts[query_of_row]])
        positions = np.arange(self.tokens) - np.repeat(before, [*of_prompts, *of_rows])
        self._longest = int(positions.max()) + 1
        ids = np.concatenate([*prompts, *inputs]).astype(np.int64)
        self.ids: Int[Tensor, "1 token"] = to_device(ids[None], device)
        self.positions: Int[Tensor, "1 token"] = to_device(positions[None], device)
        self._device = device
        behind = [
            _group(int(prompt_start[query]), len(prompt), row_start[own], of_rows[own])
            for query, (prompt, own) in enumerate(
                zip(prompts, _rows_of(query_of_row, len(prompts)), strict=True)
            )
        ]
        self._blocks = plan_blocks(
            [_group(0, 0, prompt_start, of_prompts), *behind], _OVERHEAD[device.type]
        )
        self._indices: dict[tuple[int, int, int | None], AttentionIndex] = {}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 head token width"],
        key: Float[Tensor, "1 group token width"],
        value: Float[Tensor, "1 group token width"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 token head width"]:
        """Attend to one's prompt and to what comes before in one's own row."""
        heads, groups = query.shape[1], key.shape[1]
        # [1, head, token, width] -> [token * head, width]
        queries, keys, values = (
            part[0].transpose(0, 1).flatten(0, 1) for part in (query, key, value)
        )
        index = self._index(heads, groups, window)
        attended = attend_in_blocks(queries, keys, values, index, scale)
        return attended.view(1, self.tokens, heads, -1)

    def _index(self, heads: int, groups: int, window: int | None) -> AttentionIndex:
        """Return the blocks' indices, made in the first layer that asks for them."""
        if window is not None and window >= self._longest:
            window = None  # nothing is out of sight
        asked = (heads, groups, window)
        if asked not in self._indices:
            self._indices[asked] = index_blocks(
                self._blocks,
                tokens=self.tokens,
                heads=heads,
                groups=groups,
                window=window,
                device=self._device,
            )
        return self._indices[asked]


def _rows_of(query_of_row: Int64, queries: int) -> list[Int64]:
    """Return the rows of each query."""
    by_query = np.argsort(query_of_row, kind="stable")
    bounds = np.searchsorted(query_of_row[by_query], np.arange(1, queries))
    return np.split(by_query, bounds)


def _group(prefix_start: int, prefix_length: int, start: Int64, length: Int64) -> Group:
    """Sort the rows of a group by length and leave out the empty ones."""
    order = np.argsort(-length, kind="stable")
    order = order[length[order] > 0]
    return Group(prefix_start, prefix_length, start[order], length[order])


@dataclass(frozen=True, slots=True)
class PromptPass:
    """What a pass over prompts leaves for those who go on from them; prompts are packed."""

    states: Float[Tensor, "query width"]
    """The state that predicts the first token after each prompt."""
    keys: list[Float[Tensor, "group token head_width"]]
    """Of each layer, positions applied."""
    values: list[Float[Tensor, "group token head_width"]]
    """Of each layer."""
    starts: Int64
    """First token of each prompt, and behind the last one the number of all; shape [query + 1]."""


class _KeptPrompts(PackedSequences):
    """Prompts by themselves, of which keys and values are kept."""

    def __init__(self, prompts: Sequence[Int32], device: torch.device) -> None:
        super().__init__(prompts, [], np.empty(0, dtype=np.int64), device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 head token width"],
        key: Float[Tensor, "1 group token width"],
        value: Float[Tensor, "1 group token width"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 token head width"]:
        """Keep a layer's keys and values, then attend."""
        if layer in self.keys:
            raise RuntimeError(
                f"layer {layer} attends twice, but one set of keys can be kept of it"
            )
        self.keys[layer], self.values[layer] = key[0], value[0]
        return super().attend(layer, query, key, value, scale=scale, window=window)


def prompt_pass(model: PreTrainedModel, prompts: Sequence[Int32]) -> PromptPass:
    """Run prompts, none of them empty, through the body and keep each layer's keys and values."""
    packed = _KeptPrompts(prompts, model.device)
    states = packed_states(model, packed.ids, packed.positions, packed)[0]  # [token, width]
    layers = sorted(packed.keys)
    return PromptPass(
        states.index_select(0, to_device(packed.prompt_end - 1, model.device)),
        [packed.keys[layer] for layer in layers],
        [packed.values[layer] for layer in layers],
        np.concatenate([np.zeros(1, dtype=np.int64), packed.prompt_end]),
    )
