"""The replay buffer of a simulation: versions, lengths and counts, but neither tokens nor rewards.

Searching draws responses from those of the profile: a response that a query of the profile had
more than once is one of a few *common* ones, which merge with equal ones in the buffer as they
would in `tba.buffer`; any other is taken to be new each time. Drawing follows `tba.sampling`, with
a uniform choice in place of softmax_reward.

A query has a row of slots: its common responses, then a ring of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.config.search import BufferConfig
from tba.plan.profile import Responses

Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

NEW = -1
"""In place of the number of a common response: one that was never found before."""


@dataclass(frozen=True, slots=True)
class Found:
    """A search batch."""

    queries: Int
    """Shape [query]."""
    common: Int
    """Number of the common response, or NEW; shape [query, sample]."""
    lengths: Int
    """Tokens; shape [query, sample]."""
    version: int
    """Policy version that sampled."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A trainer's batch."""

    tokens: int
    """Response tokens of the distinct trajectories, query by query."""
    versions: Int
    """Policy version of each sample; shape [query, sample]."""
    recent: Mask
    """Whether each query came from the m branch; shape [query]."""


class Catalogue:
    """Makes search batches out of the responses of a profile."""

    def __init__(
        self,
        responses: Responses,
        samples: int,
        lengths: Callable[[int], Int] | None,
        generator: np.random.Generator,
    ) -> None:
        self._lengths = np.array(responses.lengths, dtype=np.int64)
        self._samples = samples
        self._given_lengths = lengths
        self._generator = generator
        self._common = np.full(self._lengths.shape, NEW, dtype=np.int64)
        if lengths is None:
            for row, same in zip(self._common, responses.same, strict=True):
                _, number, count = np.unique(same, return_inverse=True, return_counts=True)
                rank = np.cumsum(count > 1) - 1
                row[:] = np.where(count[number] > 1, rank[number], NEW)
        self.most_common = int(self._common.max()) + 1
        """Common responses of a query at most."""

    def find(self, queries: Int, version: int) -> Found:
        """Search one batch: a query is answered as one of the profile was.

        Each of its responses is taken equally often, as far as the number of samples allows.
        """
        rows = queries % len(self._lengths)
        have = self._lengths.shape[1]
        noise = self._generator.random((len(rows), have))
        order = np.argsort(noise, axis=1)[:, np.arange(self._samples) % have]  # [query, sample]
        lengths = self._lengths[rows[:, None], order]
        if self._given_lengths is not None:
            lengths = self._given_lengths(lengths.size).reshape(lengths.shape)
        return Found(queries, self._common[rows[:, None], order], lengths, version)


class SimulatedBuffer:
    """Samples by query: which version found them, and how long they are."""

    def __init__(
        self, queries: int, most_common: int, config: BufferConfig, generator: np.random.Generator
    ) -> None:
        self._config = config
        self._generator = generator
        self._ring = config.capacity_per_query
        self._commons = most_common
        shape = (queries, most_common + self._ring)
        self._version = np.zeros(shape, dtype=np.int32)  # version + 1; 0: the slot is empty
        self._length = np.zeros(shape, dtype=np.int32)
        self._found = np.zeros(shape, dtype=np.int32)
        self._uses = np.zeros(shape, dtype=np.int32)
        self._next = np.zeros(queries, dtype=np.int64)  # place in the ring
        self._newest = np.zeros(queries, dtype=np.int64)  # version + 1
        self._seen: list[int] = []
        self._of_version: dict[int, list[Int]] = {}  # version + 1 -> queries found by it

    def add(self, batch: Found) -> None:
        """Add a search batch."""
        mark = batch.version + 1
        self._seen += batch.queries[self._newest[batch.queries] == 0].tolist()
        self._add_new(batch, mark)
        if self._commons:
            self._add_common(batch, mark)
        self._newest[batch.queries] = np.maximum(self._newest[batch.queries], mark)
        self._of_version.setdefault(mark, []).append(batch.queries)
        while len(self._of_version) > self._config.recent_versions:
            del self._of_version[min(self._of_version)]

    def _add_new(self, batch: Found, mark: int) -> None:
        is_new = batch.common == NEW
        row, column = np.nonzero(is_new)
        rank = (np.cumsum(is_new, axis=1) - 1)[row, column]
        query = batch.queries[row]
        slot = self._commons + (self._next[query] + rank) % self._ring
        self._version[query, slot] = mark
        self._length[query, slot] = batch.lengths[row, column]
        self._found[query, slot] = 1
        self._uses[query, slot] = 0
        self._next[batch.queries] += is_new.sum(1)

    def _add_common(self, batch: Found, mark: int) -> None:
        row, column = np.nonzero(batch.common != NEW)
        number = batch.common[row, column]
        counts = np.zeros((len(batch.queries), self._commons), dtype=np.int32)
        np.add.at(counts, (row, number), 1)
        query = batch.queries[row]
        self._length[query, number] = batch.lengths[row, column]
        row, number = np.nonzero(counts)
        query, count = batch.queries[row], counts[row, number]
        again = self._version[query, number] == mark
        self._found[query, number] = count + np.where(again, self._found[query, number], 0)
        self._version[query, number] = mark

    def draw(self, queries: int, samples: int, version: int) -> Drawn | None:
        """Draw a batch and count the use; None when nothing may be drawn."""
        recent = self._generator.random(queries) < self._config.on_policy_prob
        bound = self._config.max_staleness
        oldest = 1 if bound is None else max(version - bound + 1, 1)  # as marks: version + 1
        of_recent = [found for batches in self._of_version.values() for found in batches]
        recent_from = max(min(self._of_version, default=1), oldest)
        candidates = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *of_recent]))
        newest = self._pick(candidates, int(recent.sum()), recent_from, [])
        recent &= bool(newest)
        other = self._pick(np.array(self._seen), int((~recent).sum()), oldest, newest)
        if not newest and not other:
            return None
        chosen = np.empty(queries, dtype=np.int64)
        chosen[recent], chosen[~recent] = newest, other
        return self._choose(chosen, np.where(recent, recent_from, oldest), samples, recent)

    def _drawable(self, queries: Int, oldest: Int | int) -> Mask:
        """Return which slots may be drawn; shape [query, slot]."""
        drawable = self._version[queries] >= np.reshape(oldest, (-1, 1))
        if self._config.max_reuse is not None:
            drawable &= self._uses[queries] < self._config.max_reuse
        return drawable

    def _pick(self, candidates: Int, count: int, oldest: int, taken: list[int]) -> list[int]:
        """Pick drawable queries not taken, at random; repeat only when there are too few."""
        picks: list[int] = []
        if count == 0:
            return picks
        order = self._generator.permutation(len(candidates))
        for start in range(0, len(order), 4 * count):
            some = candidates[order[start : start + 4 * count]]
            some = some[self._drawable(some, oldest).any(1) & ~np.isin(some, taken)]
            picks += some[: count - len(picks)].tolist()
            if len(picks) == count:
                return picks
        pool = picks + list(dict.fromkeys(taken))
        if pool:
            picks += [pool[i] for i in self._generator.integers(len(pool), size=count - len(picks))]
        return picks

    def _choose(self, chosen: Int, oldest: Int, samples: int, recent: Mask) -> Drawn:
        """Choose samples of each query: distinct ones or, where there are too few, finds."""
        drawable = self._drawable(chosen, oldest)  # [query, slot]
        noise = np.where(drawable, self._generator.random(drawable.shape), 2.0)
        places = min(samples, noise.shape[1])
        slots = np.argpartition(noise, places - 1, axis=1)[:, :places]
        short = drawable.sum(1) < samples
        if places < samples:
            slots = np.resize(slots.T, (samples, len(chosen))).T  # every row is short
        for at in np.flatnonzero(short).tolist():
            own = np.flatnonzero(drawable[at])
            finds = np.repeat(own, self._found[chosen[at], own])
            slots[at] = self._generator.choice(finds, samples, replace=len(finds) < samples)
        used = np.zeros(drawable.shape, dtype=np.bool_)
        np.put_along_axis(used, slots, True, axis=1)
        row, slot = np.nonzero(used)
        query, slot = np.unique(np.stack([chosen[row], slot]), axis=1)
        self._uses[query, slot] += 1
        return Drawn(
            tokens=int(self._length[chosen][used].sum()),
            versions=self._version[chosen[:, None], slots].astype(np.int64) - 1,
            recent=recent,
        )
