"""Where the buffer's tokens lie: end to end, each with its log-probabilities.

A slot knows its start and length here. What belongs to slots that are gone stays until as much is
dead as alive; then the living tokens move together, which as many added ones have paid for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tba.columns import Growing, ranges
from tba.records import Float32, Int32, Int64
from tba.run.rollouts import flatten

_COLUMNS = [("token", "i4"), ("log_mu", "f4"), ("log_ref", "f4")]  # and the extras
_COMPACT_FROM = 4_096  # dead tokens; below, moving the living ones is not worth it
_SLOTS_AT_A_TIME = 65_536  # when moving; bounds the temporary index


class Arena:
    """Tokens of all samples, in columns."""

    def __init__(self, extras: Sequence[str]) -> None:
        self.extras = tuple(extras)
        """Names of what searchers computed for the objective besides, a number a token each."""
        self._tokens = Growing(np.dtype([*_COLUMNS, *((name, "f4") for name in extras)]))
        self._dead = 0

    @property
    def tokens(self) -> Int32:
        """The token ids, dead ones among them."""
        return self._tokens.data["token"]

    @property
    def size(self) -> int:
        """Tokens held, dead ones among them."""
        return self._tokens.size

    @property
    def living(self) -> int:
        """Tokens of the samples that there are."""
        return self._tokens.size - self._dead

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._tokens.data.nbytes

    def append(self, scored: pa.RecordBatch) -> Int64:
        """Copy trajectories behind what there is; return where each starts."""
        tokens, offsets = flatten(scored["tokens"])
        starts = self._tokens.size + offsets[:-1]
        new = self._tokens.extend(len(tokens))
        new["token"] = tokens
        new["log_mu"] = flatten(scored["log_mu"])[0]
        new["log_ref"] = flatten(scored["log_ref"])[0]
        for name in self.extras:
            new[name] = flatten(pc.map_lookup(scored["extras"], name, "first"))[0]
        return starts

    def read(self, column: str, slots: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """Return copies of a column, one for each row of the slot table, of shape [token]."""
        values = self._tokens.data[column]
        starts, lengths = slots["start"].tolist(), slots["length"].tolist()
        return tuple(values[s : s + n].copy() for s, n in zip(starts, lengths, strict=True))

    def set_log_ref(self, slot: NDArray[Any], values: Float32) -> None:
        """Replace the reference log-probabilities of one row of the slot table."""
        start, length = int(slot["start"]), int(slot["length"])
        assert values.shape == (length,), "one log-probability a token"
        self._tokens.data["log_ref"][start : start + length] = values

    def release(self, tokens: int) -> None:
        """Count tokens whose slot is gone."""
        self._dead += tokens

    def compact(self, slots: NDArray[Any]) -> None:
        """Close the gaps, once they are many, and tell the slot table (rows in use) where what is.

        A row whose query is negative is free.
        """
        if self._dead <= max(self._tokens.size // 2, _COMPACT_FROM):
            return
        live = np.flatnonzero(slots["query"] >= 0)
        live = live[np.argsort(slots["start"][live], kind="stable")]
        end = 0
        for part in np.array_split(live, len(live) // _SLOTS_AT_A_TIME + 1):
            source = ranges(slots["start"][part], slots["length"][part])
            self._tokens.data[end : end + len(source)] = self._tokens.data[source]
            slots["start"][part] = end + np.cumsum(slots["length"][part]) - slots["length"][part]
            end += len(source)
        self._tokens.size = end
        self._dead = 0

    def check_valid(self, starts: Int64, lengths: Int32) -> None:
        """Assert that the samples share no tokens and the rest is dead; for tests."""
        occupied = np.sort(ranges(starts, lengths))
        assert (np.diff(occupied) > 0).all(), "no two samples share tokens"
        assert len(occupied) + self._dead == self._tokens.size
