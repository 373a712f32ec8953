"""Cuts packed sequences into blocks of similar length, which attention computes as one product.

A group is a prompt with the rows that follow it; a row is a run of packed tokens that attend to the
whole prompt and causally to themselves. A prompt by itself is a row behind no prompt. A block holds
as many rows of each of its groups, so that all rows of a group share the product with its prompt.
Rows are sorted by length within their groups, and a block takes them from one rank to another.
Long rows are cut along their tokens, so that a block's scores have a bounded size and what lies
above the diagonal is mostly not computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tba.records import Bool, Int64

_SEGMENT = 128
"""Tokens of a row in one block."""

_MOST_SCORES = 2**20
"""Scores of one head in a block of several rows; what is computed of them is of bounded size."""

_NARROW = 16
"""Rows shorter than this are laid side by side: products and softmax are slow over fewer keys."""


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its rows, by their places among the packed tokens."""

    prefix_start: int
    prefix_length: int
    row_start: Int64
    """Shape [row]."""
    row_length: Int64
    """Shape [row]; not increasing, none is zero."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows whose attention is computed together; indices of packed tokens, 0 at padding."""

    token: Int64
    """The tokens that attend; shape [group, row, token]."""
    real: Bool
    """Where there is one; shape [group, row, token]."""
    own: Int64
    """The tokens of the same rows that are attended to, from their first; shape [group, row,
    own]."""
    prefix: Int64
    """The tokens of the prompts; shape [group, prefix]."""
    prefix_length: Int64
    """Shape [group]."""
    abreast: int
    """Rows that lie side by side in one: `token` and `own` hold the first's, then the second's."""

    def hidden_own(self, window: int | None) -> Bool:
        """Say which of its row's tokens a token does not see; shape [token, own]."""
        row, at = divmod(np.arange(self.own.shape[2]), self.own.shape[2] // self.abreast)
        distance = self._at()[:, None] - at
        of_token = np.repeat(np.arange(self.abreast), self.token.shape[2] // self.abreast)
        hidden: Bool = (distance < 0) | (of_token[:, None] != row)
        return hidden if window is None else hidden | (distance >= window)

    def hidden_prefix(self, window: int | None) -> Bool | None:
        """Say which of its prompt's tokens a token does not see; shape [group, token, prefix].

        Returns:
            None where all see all.
        """
        lengths = self.prefix_length[:, None, None]
        place = np.arange(self.prefix.shape[1])
        beyond: Bool = place >= lengths
        if window is None:
            return beyond if beyond.any() else None
        distance = lengths + self._at()[:, None] - place
        hidden: Bool = beyond | (distance >= window)
        return hidden if hidden.any() else None

    def _at(self) -> Int64:
        """Return the places in their rows of the tokens that attend; shape [token]."""
        own, tokens = self.own.shape[2] // self.abreast, self.token.shape[2] // self.abreast
        return np.tile(np.arange(own - tokens, own), self.abreast)


def plan_blocks(groups: Sequence[Group], overhead: int) -> list[Block]:
    """Return blocks that hold every token of every row once.

    Args:
        groups: Some may have no rows.
        overhead: What one more block costs, in scores of one head.
    """
    with_rows = [group for group in groups if len(group.row_start)]
    return [
        block
        for alike in _alike(with_rows, overhead)
        for block in _blocks_of(alike, overhead / len(alike))
    ]


def _blocks_of(alike: list[Group], overhead: float) -> Iterator[Block]:
    """Yield blocks of groups that go together."""
    rows = max(len(group.row_start) for group in alike)
    start, length = (np.zeros((len(alike), rows), dtype=np.int64) for _ in range(2))
    for at, group in enumerate(alike):
        start[at, : len(group.row_start)] = group.row_start
        length[at, : len(group.row_start)] = group.row_length
    prefix_length = np.array([group.prefix_length for group in alike])
    place = np.arange(prefix_length.max())
    prefix_start = np.array([group.prefix_start for group in alike])[:, None]
    prefix = np.where(place < prefix_length[:, None], prefix_start + place, 0)
    longest = length.max(axis=0)  # [rank]
    for ranks in _ranks(longest, len(place), overhead):
        for begin, end in _segments(int(longest[ranks.start])):
            last = ranks.start + int((longest[ranks] > begin).sum())
            of_rank = len(alike) * (end - begin) * (len(place) + end)
            step = max(1, _MOST_SCORES // of_rank)
            for first in range(ranks.start, last, step):
                kept = slice(first, min(first + step, last))
                yield _block(start[:, kept], length[:, kept], begin, end, prefix, prefix_length)


def _alike(groups: list[Group], overhead: int) -> Iterator[list[Group]]:
    """Put small groups of similar shape together, so far as padding costs less than more blocks."""
    groups = sorted(groups, key=_shape)
    chosen: list[Group] = []
    widest = (0, 0, 0)  # the largest of each number of the chosen ones' shapes
    spent = 0
    for group in groups:
        own = _shape(group)
        joined = (max(widest[0], own[0]), max(widest[1], own[1]), max(widest[2], own[2]))
        alone, together = _scores(1, own), _scores(len(chosen) + 1, joined)
        if chosen and together > min(spent + alone + overhead, _MOST_SCORES):
            yield chosen
            chosen, joined, together = [], own, alone
        chosen.append(group)
        widest, spent = joined, together
    if chosen:
        yield chosen


def _shape(group: Group) -> tuple[int, int, int]:
    """Return the longest row, the length of the prompt, and the number of rows."""
    return int(group.row_length[0]), group.prefix_length, len(group.row_start)


def _scores(groups: int, shape: tuple[int, int, int]) -> int:
    """Return the scores of one head that are computed for so many groups of one shape."""
    longest, prefix, rows = shape
    return groups * rows * longest * (prefix + longest)


def _ranks(longest: Int64, prefix: int, overhead: float) -> list[slice]:
    """Cut the ranks of the sorted rows so that padding and number of blocks together cost least.

    Args:
        longest: Longest row of each rank, not increasing; shape [rank].
        prefix: Tokens of the prompt.
        overhead: What one more block costs, in scores of one group.
    """
    starts = np.flatnonzero(np.diff(longest, prepend=longest[0] + 1))  # a cut elsewhere is no gain
    cost_of_row = (longest[starts] * (prefix + longest[starts])).astype(np.float64)
    best = np.zeros(len(starts) + 1)  # cost of all ranks before each start
    cut = np.zeros(len(starts) + 1, dtype=np.int64)
    ends = np.append(starts, len(longest))
    for end in range(1, len(ends)):
        costs = best[:end] + overhead + (ends[end] - starts[:end]) * cost_of_row[:end]
        cut[end] = np.argmin(costs)
        best[end] = costs[cut[end]]
    slices = []
    end = len(starts)
    while end:
        slices.append(slice(int(starts[cut[end]]), int(ends[end])))
        end = int(cut[end])
    return slices[::-1]


def _segments(longest: int) -> Iterator[tuple[int, int]]:
    count = -(-longest // _SEGMENT)
    bounds = [longest * at // count for at in range(count + 1)]
    yield from pairwise(bounds)


def _block(
    start: Int64, length: Int64, begin: int, end: int, prefix: Int64, prefix_length: Int64
) -> Block:
    """Return the block of tokens `begin` to `end` of rows [group, row]."""
    groups, rows = start.shape
    abreast = min(rows, -(-_NARROW // end)) if begin == 0 else 1
    missing = ((0, 0), (0, -rows % abreast))
    start, length = np.pad(start, missing), np.pad(length, missing)
    place = np.arange(end)
    real = place < length[:, :, None]
    own = np.where(real, start[:, :, None] + place, 0)
    # [group, row, token] -> [group, row / abreast, abreast * token]
    shape = (groups, -(-rows // abreast), -1)
    token, attends, own = (
        part.reshape(shape) for part in (own[:, :, begin:], real[:, :, begin:], own)
    )
    return Block(token, attends, own, prefix, prefix_length, abreast)
