"""Which samples are near by the cosine of their sentence embeddings: cos(e(a), e(b)) > above.

The embeddings are computed in the scoring process, where the searcher waits for the victim anyway,
and come as `embedding` among the extras of a sample. So the trainer's process computes a product of
matrices a delivery and loads no encoder, and a buffer rebuilt from the log needs none either. The
price is 1.5 kB a sample, in buffer and log, at 384 numbers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tba.records import EMBEDDING, Float32, Int64
from tba.run.rollouts import extra

_SLOTS_AT_ONCE = 8_192  # bounds the copy of kept embeddings


class Cosine:
    """The nearness of `tba.near_duplicates` by cosine."""

    def __init__(self, above: float) -> None:
        self._above = above
        self._units: Float32 = np.zeros((0, 0), dtype=np.float32)  # [slot, number]

    def read(self, scored: pa.RecordBatch, rows: NDArray[Any]) -> Float32:
        """Return the embedding of each row, of length 1; [row, number]."""
        del rows
        found = extra(scored, EMBEDDING)
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        return found / np.maximum(lengths, np.finfo(np.float32).tiny)

    def near(
        self, arrivals: Sequence[Float32], kept: NDArray[Any]
    ) -> list[list[tuple[float, int]]]:
        """Return for each arrival what is near: slots, and ~i for earlier arrivals."""
        own = np.stack(arrivals)
        near: list[list[tuple[float, int]]] = [[] for _ in arrivals]
        for first in range(0, len(kept), _SLOTS_AT_ONCE):
            slots = kept[first : first + _SLOTS_AT_ONCE]
            self._note(near, own @ self._units[slots].T, slots)
        among = np.tril(own @ own.T, k=-1) + np.triu(np.full((len(own), len(own)), -np.inf))
        self._note(near, among, ~np.arange(len(own)))
        return near

    def keep(self, slots: Int64, entries: Sequence[Float32]) -> None:
        """Note the embeddings of slots."""
        if not len(slots):
            return
        if slots.max() >= len(self._units):
            shape = (2 * (int(slots.max()) + 1), len(entries[0]))
            grown = np.zeros(shape, dtype=np.float32)
            grown[: len(self._units)] = self._units if len(self._units) else 0
            self._units = grown
        self._units[slots] = np.stack(entries)

    def _note(
        self, near: list[list[tuple[float, int]]], cosine: Float32, others: NDArray[Any]
    ) -> None:
        """Add what is near; [arrival, other]."""
        at, other = np.nonzero(cosine > self._above)
        distance = (1 - cosine[at, other]).round(6)  # the last bits depend on the products' shape
        found = zip(at.tolist(), distance.tolist(), others[other].tolist(), strict=True)
        for row, far, which in found:
            near[row].append((far, which))
