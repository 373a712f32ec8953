"""Near-duplicates: sequences of a query whose edit distance is below a share of their lengths.

    near(a, b)  <=>  d(a, b) < share (|a| + |b|)      d: Levenshtein distance in tokens

(Lee et al., 2405.18540, with share .25.) Of an arriving sequence and the nearest kept one, by
d / (|a| + |b|), if that is near, the one with the higher reward stays.

Comparing each arrival with everything kept would cost O(n). But d is at least the longer length
less the tokens that both have, so a near b shares more than (1 - 2 share) |a| tokens with a, hence
n of any n - 1 + 2 share |a| of them, such as the rarest. Only sequences with three of these are
looked at; those that have enough tokens of a are compared exactly, all of a delivery at once.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.columns import ranges
from tba.records import Int32, Int64

_REBUILD_FROM = 4_096  # stale postings; below, making the index anew is not worth it
_SHARED_RARE = 3  # more make fewer candidates of more common tokens
_PAIRS_AT_ONCE = 16_384  # bounds the table of distances


class TokenIndex:
    """Which sequences of a query hold a token. Stale entries only cost time, and not for long."""

    def __init__(self) -> None:
        self._slots_of: dict[int, array[int]] = {}
        self.entries = 0
        """Entries, stale ones included."""

    def add(self, query: int, tokens: Int32, slot: int) -> None:
        """Note that a slot of a query holds these tokens."""
        for token in set(tokens.tolist()):
            self._slots_of.setdefault(query << 32 | token, array("q")).append(slot)
            self.entries += 1

    def sharing(self, query: int, tokens: Int32, count: int, least: int) -> Int64:
        """Return the slots that hold `least` or more of the `count` rarest of the tokens."""
        keys = (query << 32 | token for token in tokens.tolist())
        found = sorted((self._slots_of.get(key, _NONE) for key in keys), key=len)[:count]
        views = [np.frombuffer(slots, dtype=np.int64) for slots in found if slots]
        held = np.bincount(np.concatenate([np.empty(0, np.int64), *views]))
        return np.flatnonzero(held >= least)

    def is_stale(self, live_tokens: int) -> bool:
        """Say whether it had better be made anew."""
        return self.entries > 2 * live_tokens + _REBUILD_FROM


_NONE: "array[int]" = array("q")


@dataclass(frozen=True, slots=True)
class Kept:
    """What the buffer holds, as `candidates` needs it."""

    tokens: Int32
    """The token arena."""
    start: Int64
    """First token of each slot."""
    length: Int64
    """Tokens of each slot, the end-of-sequence token left out."""
    query: Int32
    """Query of each slot; -1: it is free."""


def candidates(index: TokenIndex, kept: Kept, query: int, tokens: Int32, share: float) -> Int64:
    """Return slots of a query that may be near; all that are near are among them."""
    size = len(tokens)
    needed = int(np.floor(size * (1 - 2 * share) - 1e-9)) + 1  # more than (1 - 2 share) |a|
    least = max(1, min(_SHARED_RARE, needed))
    slots = index.sharing(query, tokens, size - needed + least, least)
    slots = slots[kept.query[slots] == query]
    lengths = kept.length[slots]
    some = lengths > 0
    slots, lengths = slots[some], lengths[some]
    if not len(slots):
        return slots
    common = np.isin(kept.tokens[ranges(kept.start[slots], lengths)], tokens)
    shared = np.add.reduceat(common, np.cumsum(lengths) - lengths, dtype=np.int64)
    return slots[np.maximum(lengths, size) - shared < share * (lengths + size)]


def edit_distances(first: Sequence[Int32], second: Sequence[Int32]) -> Int64:
    """Return the Levenshtein distance of each pair, the sequences being aligned."""
    parts = [
        _edit_distances(first[at : at + _PAIRS_AT_ONCE], second[at : at + _PAIRS_AT_ONCE])
        for at in range(0, len(first), _PAIRS_AT_ONCE)
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _edit_distances(first: Sequence[Int32], second: Sequence[Int32]) -> Int64:
    """Fill the table of Wagner and Fischer for all pairs at once, a row for each token of `first`.

    An insertion depends on the entry to its left in the same row: with the column subtracted, it
    is a running minimum.
    """
    a, a_length = _padded(first, -1)
    b, b_length = _padded(second, -2)
    column = np.arange(b.shape[1] + 1, dtype=np.int32)
    row = np.repeat(column[None], len(a), axis=0)  # [pair, column]
    found = row[np.arange(len(a)), b_length].astype(np.int64)  # where `first` is empty
    for at in range(a.shape[1]):
        new = np.empty_like(row)
        new[:, 0] = at + 1
        new[:, 1:] = np.minimum(row[:, :-1] + (a[:, at, None] != b), row[:, 1:] + 1)
        row = np.minimum.accumulate(new - column, axis=1) + column
        ends = np.flatnonzero(a_length == at + 1)
        found[ends] = row[ends, b_length[ends]]
    return found


def _padded(rows: Sequence[Int32], padding: int) -> tuple[Int32, Int64]:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    padded = np.full((len(rows), int(lengths.max(initial=0))), padding, dtype=np.int32)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded, lengths


class NearDuplicates:
    """Keeps a buffer free of near-duplicates; what it holds of the buffer is an index of tokens."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._index = TokenIndex()

    def screen(
        self,
        rows: NDArray[Any],
        values: Int32,
        offsets: Int64,
        twin: Int64,
        slots: NDArray[Any],
        arena: Int32,
    ) -> tuple[Int64, Int64]:
        """Decide one arrival after the other between it and the nearest one there is by then.

        Args:
            rows: Of the arrivals, as in the slot table, no two of them equal.
            values: Their tokens, end to end; [token].
            offsets: The n + 1 bounds of these.
            twin: Slot of the equal sequence that each will replace; -1 where there is none.
            slots: The slot table.
            arena: Tokens of all slots.

        Returns:
            Positions of the arrivals that stay, and the slots that give way to better ones.
        """
        ends = offsets[1:] - rows["finished"]  # a finished one ends with a token that says so
        bodies = [values[a:b] for a, b in zip(offsets[:-1].tolist(), ends.tolist(), strict=True)]
        kept = Kept(arena, slots["start"], slots["length"] - slots["finished"], slots["query"])
        pairs = _near_pairs(rows["query"], bodies, kept, self._index, self._share)
        arrival = (slots["arrival"], rows["arrival"])
        near = [
            [(d, arrival[other < 0][other if other >= 0 else ~other], other) for d, other in own]
            for own in pairs
        ]
        accepted, displaced = self._decide(rows, slots, near, twin)
        return np.flatnonzero(accepted), np.array(displaced, dtype=np.int64)

    @staticmethod
    def _decide(
        rows: NDArray[Any],
        slots: NDArray[Any],
        near: list[list[tuple[float, int, int]]],
        twin: Int64,
    ) -> tuple[NDArray[np.bool_], list[int]]:
        """Say which arrivals stay, and which slots give way."""
        accepted = np.zeros(len(rows), dtype=np.bool_)
        gone: set[int] = set()  # slots that are replaced by a twin or displaced
        displaced: list[int] = []
        twin_of: dict[int, int] = {}  # slot that an arrival has taken the place of
        for at, (own, equal) in enumerate(zip(near, twin.tolist(), strict=True)):
            accepted[at] = True
            if equal >= 0 and equal not in gone:  # it has the place of its equal
                gone.add(equal)
                twin_of[at] = equal
                continue
            there = [
                (distance, arrival, other)
                for distance, arrival, other in own
                if (accepted[~other] if other < 0 else other not in gone)
            ]
            if not there:
                continue
            *_, other = min(there)  # of equally near ones the oldest
            rival = rows["reward"][~other] if other < 0 else slots["reward"][other]
            if rival >= rows["reward"][at]:
                accepted[at] = False
            elif other < 0:
                accepted[~other] = False
                if ~other in twin_of:
                    displaced.append(twin_of[~other])
            else:
                gone.add(other)
                displaced.append(other)
        return accepted, displaced

    def note(self, new: Int64, slots: NDArray[Any], arena: Int32, live_tokens: int) -> None:
        """Index the tokens of new slots; of all slots where too much of the index is stale."""
        if self._index.is_stale(live_tokens):
            self._index = TokenIndex()
            new = np.flatnonzero(slots["query"] >= 0)
        rows = slots[new]
        columns = (rows["query"], rows["start"], rows["length"] - rows["finished"], new)
        for query, start, length, slot in zip(*(c.tolist() for c in columns), strict=True):
            if query >= 0:
                self._index.add(query, arena[start : start + length], slot)


def _near_pairs(
    queries: Int32, bodies: Sequence[Int32], kept: Kept, index: TokenIndex, share: float
) -> list[list[tuple[float, int]]]:
    """Return for each arrival what is near, as (d / (|a| + |b|), slot or ~position of an earlier).

    Earlier arrivals of the delivery are few, and compared all.
    """
    pairs: list[tuple[int, int]] = []
    first: list[Int32] = []
    second: list[Int32] = []
    for at, (query, tokens) in enumerate(zip(queries.tolist(), bodies, strict=True)):
        slots = candidates(index, kept, query, tokens, share).tolist()
        earlier = [other for other in range(at) if queries[other] == query]
        pairs += [(at, slot) for slot in slots] + [(at, ~other) for other in earlier]
        first += [tokens] * (len(slots) + len(earlier))
        second += [kept.tokens[kept.start[s] : kept.start[s] + kept.length[s]] for s in slots]
        second += [bodies[other] for other in earlier]
    near: list[list[tuple[float, int]]] = [[] for _ in bodies]
    distances = edit_distances(first, second).tolist()
    for (at, other), a, b, distance in zip(pairs, first, second, distances, strict=True):
        if distance < share * (len(a) + len(b)):
            near[at].append((distance / (len(a) + len(b)), other))
    return near
