"""The replay buffer: every unique response found, in columns, a capacity a query.

Tokens with their log-probabilities lie end to end in one arena; a *slot* is a trajectory's row in
the slot table; a query's slots lie in its row of the index, newest last. Adding costs O(tokens),
reading O(what is read), and a trajectory of 8 tokens takes about 200 bytes. How a batch is chosen
is `sampling.py`'s matter.

The buffer is a function of the batches added, in order: adding those of the rollout log again
rebuilds it exactly; `state` holds the rest (uses, refreshed reference log-probabilities).
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tba.arena import Arena
from tba.columns import Growing, last_of_each, occurrences, places_among, ranges
from tba.config.search import BufferConfig, NearDuplicatesConfig, NearDuplicatesKept
from tba.near_duplicates import NearDuplicates, load_near_duplicates
from tba.recency import Groups, Members, Recency, Recent, good_part
from tba.records import Float32, Int32, Int64
from tba.run.rollouts import flatten
from tba.slots import SLOT, AddResult, read_slots, slots_of, surplus

_QUERY = np.dtype(
    [
        ("query_id", "i8"),
        ("start", "i8"),  # in the prompt arena
        ("length", "i4"),
        ("samples", "i4"),
        ("newest_version", "i4"),
        ("least_uses", "i4"),
    ],
    align=True,
)
_NO_SLOTS = np.empty(0, dtype=np.int64)
_ALL_KEPT = NearDuplicatesKept()


class ReplayBuffer:
    """Unique responses by query, the newest or the best `capacity_per_query` of each.

    Queries are numbered in order of first arrival; numbers never change. A slot stays what it is
    until the next `add`. One thread at a time.
    """

    def __init__(
        self,
        capacity_per_query: int,
        extras: Sequence[str] = (),
        *,
        evict: Literal["oldest", "lowest"] = "oldest",
        near_duplicates: NearDuplicatesConfig = _ALL_KEPT,
    ) -> None:
        self.capacity_per_query = capacity_per_query
        self._evict = evict
        self._near = load_near_duplicates(near_duplicates)
        self.kept = 0
        """Trajectories that were new when added."""
        self.duplicate = 0
        """Trajectories merged with an equal one."""
        self.excluded = 0
        """Trajectories without a usable reward."""
        self.extras = tuple(extras)
        """Names of what searchers computed for the objective besides, a number a token each."""
        self._arena = Arena(extras)
        self._prompts = Growing(np.int32)
        self._slots = Growing(SLOT)
        self._free = array("q")
        self._queries = Growing(_QUERY)
        self._number_of = np.empty(0, dtype=np.int32)  # by query_id; -1: never seen
        self._index = np.empty((0, 1), dtype=np.int32)  # [query, sample] -> slot
        self._recency = Recency()
        self._by_use = Groups()  # queries by the least use among their samples

    @classmethod
    def of(cls, config: BufferConfig, extras: Sequence[str] = ()) -> Self:
        """Return an empty buffer as configured."""
        return cls(
            config.capacity_per_query,
            extras,
            evict=config.evict,
            near_duplicates=config.near_duplicates,
        )

    def __len__(self) -> int:
        """Return how many samples can be drawn."""
        return self._slots.size - len(self._free)

    @property
    def newest_version(self) -> int:
        """Newest policy version among the samples; -1 when there is none."""
        return self._recency.versions[-1] if self._recency.versions else -1

    @property
    def queries_seen(self) -> Int64:
        """Ids of all queries with samples, in order of first arrival: number -> query_id."""
        return self._queries.rows["query_id"]

    @property
    def least_uses(self) -> Int32:
        """Batches that contained a query's least used sample: number -> uses."""
        return self._queries.rows["least_uses"]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        tables = (self._prompts, self._slots, self._queries)
        arrays = self._arena.nbytes + sum(table.data.nbytes for table in tables)
        groups = self._recency.queries.nbytes + self._by_use.nbytes
        return arrays + self._number_of.nbytes + self._index.nbytes + groups

    def add(self, batch: pa.RecordBatch, *, version_ceiling: int | None = None) -> AddResult:
        """Add scored trajectories (a batch of the rollout log); the newest of equal ones wins.

        `version_ceiling` lowers policy versions above it: after resuming from an older checkpoint
        the versions of samples from the lost future mean nothing any more. A reference of the lost
        future gets the version -1, that of no reference.
        """
        arrived = self.kept + self.duplicate + self.excluded
        scored, rows = read_slots(batch, arrived)
        excluded = batch.num_rows - len(rows)
        if version_ceiling is not None:
            np.minimum(rows["policy_version"], version_ceiling, out=rows["policy_version"])
            rows["refreshed"] = rows["reference_version"] > version_ceiling
            rows["reference_version"][rows["refreshed"]] = -1
        latest = last_of_each(rows["key"])
        duplicate = len(rows) - len(latest)
        if duplicate:
            rows["found"] = occurrences(rows["key"], rows["policy_version"])
            scored, rows = scored.take(pa.array(latest)), rows[latest]
        if len(rows):
            rows["query"] = self._numbers(scored)
            displaced = _NO_SLOTS
            if self._near is not None:
                accepted, displaced = self._screen(self._near, scored, rows)
                duplicate += len(rows) - len(accepted) + len(displaced)
                scored, rows = scored.take(pa.array(accepted)), rows[accepted]
            if len(rows):
                duplicate += self._merge(rows["query"], self._store(scored, rows), displaced)
        self._arena.compact(self._slots.rows)
        result = AddResult(batch.num_rows - excluded - duplicate, duplicate, excluded)
        self.kept += result.kept
        self.duplicate += result.duplicate
        self.excluded += result.excluded
        return result

    def samples(self, number: int) -> Int32:
        """Return the slots of a query's samples, newest last."""
        return self._index[number, : self._queries.data["samples"][number]]

    def field(self, name: str, slots: NDArray[Any]) -> NDArray[Any]:
        """Return one column of the slot table for the given slots."""
        return self._slots.data[name][slots]

    def prompt(self, number: int) -> Int32:
        """Return a copy of a query's prompt, shape [prompt]."""
        start, length = self._queries.data[["start", "length"]][number]
        return self._prompts.data[start : start + length].copy()

    def tokens(self, column: str, slots: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """Return copies of a column of the token arena, one per slot, each of shape [token]."""
        return self._arena.read(column, self._slots.data[slots])

    def recent(self, versions: int) -> Recent:
        """Return the queries with samples of the newest `versions` distinct policy versions."""
        return self._recency.newest(versions)

    def eligible(self, oldest_version: int | None, max_uses: int | None) -> Sequence[int] | Int64:
        """Return the queries that may have a sample this new, used in fewer batches than that.

        Where a good part of the queries has one, some are returned that have none, so that no list
        of them need be made; of the rest no more are looked at than one of the bounds leaves.
        """
        fits = partial(self._within, oldest_version, max_uses)
        queries = range(self._queries.size)
        if not queries or good_part(queries, fits):
            return queries
        within = []
        if oldest_version is not None:
            within.append(Members(self._recency.queries.from_key(oldest_version)))
        if max_uses is not None:
            within.append(Members(self._by_use.below_key(max_uses)))
        fewest = min(within, key=len)
        if len(within) < 2 or good_part(fewest, fits):
            return fewest
        numbers = fewest.all()
        return numbers[fits(numbers)]

    def _within(
        self, oldest_version: int | None, max_uses: int | None, numbers: Int64
    ) -> NDArray[np.bool_]:
        """Say which queries have a sample within each bound, not always the same one."""
        queries = self._queries.data
        fits = np.ones(len(numbers), dtype=np.bool_)
        if oldest_version is not None:
            fits &= queries["newest_version"][numbers] >= oldest_version
        if max_uses is not None:
            fits &= queries["least_uses"][numbers] < max_uses
        return fits

    def count_use(self, slots: NDArray[Any]) -> None:
        """Note that one more batch contains these slots."""
        slots = np.unique(slots)
        self._slots.data["uses"][slots] += 1
        self._update_least_uses(slots)

    def set_log_ref(
        self, slots: NDArray[Any], log_ref: Sequence[Float32], reference_version: int
    ) -> None:
        """Replace reference log-probabilities, recomputed after a reference reset."""
        for slot, values in zip(slots.tolist(), log_ref, strict=True):
            self._arena.set_log_ref(self._slots.data[slot], values)
        self._slots.data["reference_version"][slots] = reference_version
        self._slots.data["refreshed"][slots] = True

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the rollout log does not hold, keyed so that it fits a rebuilt buffer."""
        rows = self._slots.rows
        used = np.flatnonzero((rows["query"] >= 0) & (rows["uses"] > 0))
        refreshed = np.flatnonzero((rows["query"] >= 0) & rows["refreshed"])
        return {
            "used": rows["arrival"][used],
            "uses": rows["uses"][used],
            "refreshed": rows["arrival"][refreshed],
            "reference_version": rows["reference_version"][refreshed],
            "length": rows["length"][refreshed],
            "log_ref": np.concatenate(
                [np.empty(0, np.float32), *self.tokens("log_ref", refreshed)]
            ),
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned on a rebuilt buffer; samples since gone are left out."""
        slots = slots_of(state["used"], self._slots.rows)
        here = slots >= 0
        self._slots.data["uses"][slots[here]] = state["uses"][here]
        self._update_least_uses(slots[here])
        log_ref = np.split(state["log_ref"], np.cumsum(state["length"])[:-1])
        slots = slots_of(state["refreshed"], self._slots.rows)
        for slot, version, values in zip(slots, state["reference_version"], log_ref, strict=False):
            if slot >= 0:
                self.set_log_ref(np.array([slot]), [values], int(version))

    def check_valid(self) -> None:
        """Assert every invariant, at the cost of a scan; for tests."""
        rows, queries = self._slots.rows, self._queries.rows
        live = np.flatnonzero(rows["query"] >= 0)
        indexed = [self.samples(number) for number in range(len(queries))]
        assert sorted(self._free) == np.flatnonzero(rows["query"] < 0).tolist()
        assert np.array_equal(np.sort(np.concatenate([np.empty(0, int), *indexed])), live)
        assert len(np.unique(rows["key"][live])) == len(live) == len(self)
        for number, slots in enumerate(indexed):
            assert 1 <= len(slots) <= self.capacity_per_query
            assert (rows["query"][slots] == number).all()
            assert (np.diff(rows["arrival"][slots]) > 0).all(), "newest last"
            assert queries["newest_version"][number] == rows["policy_version"][slots].max()
            assert queries["least_uses"][number] == rows["uses"][slots].min()
            assert self._number_of[queries["query_id"][number]] == number
        self._arena.check_valid(rows["start"][live], rows["length"][live])
        self._recency.check_valid(queries["newest_version"], rows["policy_version"][live])
        self._by_use.check_valid(queries["least_uses"])

    def _numbers(self, scored: pa.RecordBatch) -> Int32:
        """Return the number of each row's query; number new ones and store their prompts."""
        query_id = scored["query_id"].to_numpy()
        assert query_id.min() >= 0, "a query id is a position"
        if query_id.max() >= len(self._number_of):
            grown = np.full(int(query_id.max()) * 5 // 4 + 16, -1, dtype=np.int32)
            grown[: len(self._number_of)] = self._number_of
            self._number_of = grown
        unknown = np.flatnonzero(self._number_of[query_id] < 0)
        if len(unknown):
            _, first = np.unique(query_id[unknown], return_index=True)
            new = np.sort(unknown[first])
            self._add_queries(query_id[new], scored["prompt_ids"].take(pa.array(new)))
        return self._number_of[query_id]

    def _add_queries(self, query_id: Int64, prompts: pa.ListArray) -> None:
        values, offsets = flatten(prompts)
        rows = np.zeros(len(query_id), dtype=_QUERY)
        rows["query_id"] = query_id
        rows["start"] = self._prompts.size + offsets[:-1]
        rows["length"] = np.diff(offsets)
        self._number_of[query_id] = self._queries.size + np.arange(len(query_id))
        self._prompts.extend(len(values))[:] = values
        self._queries.extend(len(rows))[:] = rows
        self._recency.queries.add_queries(len(rows))
        self._by_use.add_queries(len(rows))
        if len(self._index) < len(self._queries.data):
            self._grow_index(len(self._queries.data), self._index.shape[1])

    def _store(self, scored: pa.RecordBatch, rows: NDArray[Any]) -> Int64:
        """Copy trajectories into the arena and into free or new slots; return the slots."""
        rows["start"] = self._arena.append(scored)
        reused = min(len(self._free), len(rows))
        slots = np.arange(self._slots.size - reused, self._slots.size - reused + len(rows))
        if reused:
            slots[:reused] = self._free[-reused:]
            del self._free[-reused:]
        self._slots.extend(len(rows) - reused)
        self._slots.data[slots] = rows
        self._recency.count(rows["policy_version"], 1)
        return slots

    def _screen(
        self, near: NearDuplicates, scored: pa.RecordBatch, rows: NDArray[Any]
    ) -> tuple[Int64, Int64]:
        """Return the rows that are not worse near-duplicates, and the slots that give way."""
        old, _ = self._samples_of(np.unique(rows["query"]))
        twin = np.full(len(rows), -1)
        if len(old):
            place = places_among(self.field("key", old), rows["key"])
            twin = np.where(place < 0, -1, old[place])
        return near.screen(scored, rows, twin, self.samples, self._slots.rows)

    def _merge(self, number: Int32, slots: Int64, displaced: Int64) -> int:
        """Index new slots under their queries; return how many equal samples they replaced."""
        queries = np.unique(number)
        old, counts = self._samples_of(queries)
        twin = places_among(self.field("key", slots), self.field("key", old))
        equal = twin >= 0
        self._count_finds(old[equal], slots[twin[equal]])
        lost = equal | np.isin(old, displaced)
        owner = np.concatenate([np.repeat(queries, counts)[~lost], number])
        merged = np.concatenate([old[~lost], slots])
        order = np.argsort(owner, kind="stable")  # by query, newest last
        evicted = self._set_samples(queries, owner[order], merged[order])
        self._release(np.concatenate([old[lost], evicted]))
        if self._near is not None:
            self._near.note(slots)
        return int(equal.sum())

    def _samples_of(self, numbers: NDArray[Any]) -> tuple[Int32, Int32]:
        """Return the samples of queries, end to end, and how many each has."""
        counts = self._queries.data["samples"][numbers]
        starts = numbers.astype(np.int64) * self._index.shape[1]
        return self._index.reshape(-1)[ranges(starts, counts)], counts

    def _count_finds(self, replaced: NDArray[Any], new: NDArray[Any]) -> None:
        """Add the count of equal old samples to new ones that the same policy version found."""
        same = self.field("policy_version", replaced) == self.field("policy_version", new)
        self._slots.data["found"][new[same]] += self.field("found", replaced[same])

    def _set_samples(
        self, numbers: Int32, owner: NDArray[Any], slots: NDArray[Any]
    ) -> NDArray[Any]:
        """Make slots, ordered by owner, the samples of queries; return those beyond capacity."""
        ends = np.searchsorted(owner, numbers, side="right")
        counts = np.diff(ends, prepend=0)
        kept_counts = np.minimum(counts, self.capacity_per_query)
        kept = ~surplus(
            self.field("reward", slots), ends, counts, self.capacity_per_query, evict=self._evict
        )
        firsts = np.cumsum(kept_counts) - kept_counts
        place = np.cumsum(kept) - 1 - np.repeat(firsts, counts)
        if kept_counts.max() > self._index.shape[1]:
            width = max(int(kept_counts.max()), 2 * self._index.shape[1])
            self._grow_index(len(self._index), min(width, self.capacity_per_query))
        self._index[owner[kept], place[kept]] = slots[kept]
        newest = np.maximum.reduceat(self.field("policy_version", slots[kept]), firsts)
        least = np.minimum.reduceat(self.field("uses", slots[kept]), firsts)
        queries = self._queries.data
        queries["samples"][numbers] = kept_counts
        queries["newest_version"][numbers] = newest
        queries["least_uses"][numbers] = least
        for number, version, uses in zip(
            numbers.tolist(), newest.tolist(), least.tolist(), strict=True
        ):
            self._recency.queries.move(number, version)
            self._by_use.move(number, uses)
        return slots[~kept]

    def _grow_index(self, queries: int, width: int) -> None:
        grown = np.empty((queries, width), dtype=np.int32)
        grown[: len(self._index), : self._index.shape[1]] = self._index
        self._index = grown

    def _release(self, slots: NDArray[Any]) -> None:
        if not len(slots):
            return
        self._recency.count(self.field("policy_version", slots), -1)
        self._arena.release(int(self.field("length", slots).sum()))
        self._slots.data["query"][slots] = -1
        self._free.extend(slots.tolist())

    def _update_least_uses(self, slots: NDArray[Any]) -> None:
        numbers = np.unique(self.field("query", slots))
        if not len(numbers):
            return
        samples, counts = self._samples_of(numbers)
        least = np.minimum.reduceat(self.field("uses", samples), np.cumsum(counts) - counts)
        self._queries.data["least_uses"][numbers] = least
        for number, uses in zip(numbers.tolist(), least.tolist(), strict=True):
            self._by_use.move(number, uses)
