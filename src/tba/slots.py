"""The buffer's slot table: a row a trajectory, how a delivery is read into it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tba.columns import lowest, sequence_keys
from tba.records import FinishReason, Float32, Int64, Outcome
from tba.run.rollouts import flatten

SLOT = np.dtype(
    [
        ("key", "u8"),  # hash of query and tokens
        ("arrival", "i8"),  # position among all trajectories ever added, excluded ones included
        ("start", "i8"),  # in the token arena
        ("length", "i4"),
        ("query", "i4"),  # the query's number in order of first arrival; -1: the slot is free
        ("policy_version", "i4"),
        ("reference_version", "i4"),
        ("uses", "i4"),  # batches in which it occurred
        ("found", "i4"),  # how often the policy version that found it last has found it
        ("reward", "f4"),
        ("finished", "?"),
        ("refreshed", "?"),  # log_ref is no longer the logged one
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class AddResult:
    """What became of the trajectories of one batch."""

    kept: int
    """New to the buffer."""
    duplicate: int
    """Merged with a response of the same tokens to the same query, of which the newest is kept, or
    with a near one, of which the better is."""
    excluded: int
    """Without a usable reward: counted, not stored."""


def read_slots(batch: pa.RecordBatch, arrived: int) -> tuple[pa.RecordBatch, NDArray[Any]]:
    """Return the rows of a batch whose reward may be used, and a slot table row for each."""
    usable = _equals(batch["outcome"], Outcome.OK)
    scored = batch if usable.all() else batch.filter(pa.array(usable))
    tokens, offsets = flatten(scored["tokens"])
    rows = np.zeros(len(scored), dtype=SLOT)
    rows["key"] = sequence_keys(scored["query_id"].to_numpy(), tokens, offsets)
    rows["arrival"] = arrived + np.flatnonzero(usable)
    rows["length"] = np.diff(offsets)
    rows["found"] = 1
    rows["finished"] = _equals(scored["finish_reason"], FinishReason.STOP)
    for name in ("policy_version", "reference_version", "reward"):
        rows[name] = scored[name].to_numpy()
    return scored, rows


def surplus(
    reward: Float32, ends: Int64, counts: Int64, capacity: int, *, evict: str
) -> NDArray[np.bool_]:
    """Say which samples of some queries go, so that `capacity` of each are left.

    Args:
        reward: Of the samples, those of a query side by side and the newest last; [sample].
        ends: Where the samples of each query end; [query].
        counts: How many each has; [query].
        capacity: How many are kept.
        evict: "oldest", or "lowest": those of the lowest reward, of equal ones the oldest.
    """
    if evict == "oldest":
        place: Int64 = np.arange(len(reward)) - np.repeat(
            ends - np.minimum(counts, capacity), counts
        )
        return place < 0
    gone = np.zeros(len(reward), dtype=np.bool_)
    for at in np.flatnonzero(counts > capacity).tolist():
        first = int(ends[at] - counts[at])
        own = lowest(reward[first : ends[at]], int(counts[at]) - capacity)
        gone[first + own] = True
    return gone


def _equals(column: pa.StringArray, word: str) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = pc.equal(column, str(word)).to_numpy(zero_copy_only=False)
    return same


def slots_of(arrival: Int64, rows: NDArray[Any]) -> Int64:
    """Return the slot of each arrival in the table (rows in use), -1 where its sample is gone."""
    live = np.flatnonzero(rows["query"] >= 0)
    live = live[np.argsort(rows["arrival"][live])]
    place = np.searchsorted(rows["arrival"][live], arrival)
    found = np.isin(arrival, rows["arrival"][live])
    return np.where(found, np.append(live, -1)[place], -1)
