"""Near-duplicates: of two near samples of a query only the one with the higher reward is kept.

    edit distance   near(a, b)  <=>  d(a, b) < share (|a| + |b|)     `tba.edit_distance`
    cosine          near(a, b)  <=>  cos(e(a), e(b)) > above         `tba.cosine`

(Lee et al., 2405.18540: share .25, above .4.) An arriving sample is compared with the nearest kept
one, if that is near. Both rules are exact and run in the trainer's process, at each delivery; what
takes long, the embeddings, is computed beside the rewards in the scoring process and comes with the
sample.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tba.config.search import NearByCosine, NearByEditDistance, NearDuplicatesConfig
from tba.cosine import Cosine
from tba.edit_distance import EditDistance
from tba.records import Int64


class Nearness(Protocol):
    """What makes two samples near; holds what it needs to know of each slot."""

    def read(self, scored: pa.RecordBatch, rows: NDArray[Any]) -> Sequence[Any] | NDArray[Any]:
        """Return what is compared of each row: an entry a row."""
        ...

    def near(self, arrivals: Sequence[Any], kept: NDArray[Any]) -> list[list[tuple[float, int]]]:
        """Return for each arrival of a query all that is near, with its distance.

        It is a slot among those kept, or ~i for the i-th arrival, if that comes earlier.
        """
        ...

    def keep(self, slots: Int64, entries: Sequence[Any]) -> None:
        """Note what slots hold from now on."""
        ...


def load_near_duplicates(rule: NearDuplicatesConfig) -> "NearDuplicates | None":
    """Return what applies a rule; None where it keeps everything."""
    match rule:
        case NearByEditDistance():
            return NearDuplicates(EditDistance(rule.share))
        case NearByCosine():
            return NearDuplicates(Cosine(rule.above))
    return None


class NearDuplicates:
    """Keeps a buffer free of near-duplicates."""

    def __init__(self, measure: Nearness) -> None:
        self._measure = measure
        self._accepted: list[Any] = []  # of the rows that `screen` let through

    def screen(
        self,
        scored: pa.RecordBatch,
        rows: NDArray[Any],
        twin: Int64,
        samples: Callable[[int], NDArray[Any]],
        slots: NDArray[Any],
    ) -> tuple[Int64, Int64]:
        """Decide one arrival after the other between it and the nearest one there is by then.

        Args:
            scored: The arrivals, as in the rollout log.
            rows: The same as in the slot table, no two of them equal.
            twin: Slot of the equal sequence that each will replace; -1 where there is none.
            samples: Returns the slots of a query.
            slots: The slot table.

        Returns:
            Positions of the arrivals that stay, and the slots that give way to better ones.
        """
        entries = self._measure.read(scored, rows)
        arrival = (slots["arrival"], rows["arrival"])
        near: list[list[tuple[float, int, int]]] = [[] for _ in rows]
        for query in np.unique(rows["query"]).tolist():
            at = np.flatnonzero(rows["query"] == query).tolist()
            found = self._measure.near([entries[row] for row in at], samples(query))
            for row, own in zip(at, found, strict=True):
                named = [(d, other if other >= 0 else ~at[~other]) for d, other in own]
                near[row] = [
                    (d, int(arrival[other < 0][other if other >= 0 else ~other]), other)
                    for d, other in named
                ]
        accepted, displaced = _decide(rows, slots, near, twin)
        stay = np.flatnonzero(accepted)
        self._accepted = [entries[row] for row in stay.tolist()]
        return stay, np.array(displaced, dtype=np.int64)

    def note(self, new: Int64) -> None:
        """Note the slots of the arrivals that stayed, in their order."""
        self._measure.keep(new, self._accepted)


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
