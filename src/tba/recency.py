"""Which queries belong to the most recent sync: an index of the buffer's queries by policy version.

Each query is filed once, under the newest version among its samples, so the queries with samples of
the newest w versions are whole groups, at most w, and one of them is found in O(w).
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Recent(Sequence[int]):
    """Queries with samples of the newest policy versions; valid until the next `add`."""

    def __init__(self, oldest_version: int, groups: Sequence[Sequence[int]]) -> None:
        self.oldest_version = oldest_version
        """Samples from this version on are the recent ones."""
        self._groups = groups

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups)

    def __getitem__(self, position: Any) -> Any:
        for group in self._groups:
            if position < len(group):
                return group[position]
            position -= len(group)
        raise IndexError(position)


class Recency:
    """The policy versions held, and each query under the newest version of its samples."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        """Distinct versions among the samples, ascending."""
        self._samples: dict[int, int] = {}  # version -> how many samples
        self._groups: dict[int, array[int]] = {}  # version -> queries with no newer sample
        self._group_of = array("q")  # query -> version; -1: in none yet
        self._place = array("q")  # query -> position in its group

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, the few Python objects left out."""
        return sum(8 * len(a) for a in (self._group_of, self._place, *self._groups.values()))

    def add_queries(self, count: int) -> None:
        """Make room for `count` more queries, in no group yet."""
        self._group_of.extend([-1] * count)
        self._place.extend([-1] * count)

    def move(self, number: int, version: int) -> None:
        """File a query under the newest version of its samples."""
        old = self._group_of[number]
        if old == version:
            return
        if old >= 0:
            group = self._groups[old]
            last = group.pop()
            if last != number:  # the last one takes the place that becomes free
                group[self._place[number]] = last
                self._place[last] = self._place[number]
            if not group:
                del self._groups[old]
        group = self._groups.setdefault(version, array("q"))
        self._place[number] = len(group)
        self._group_of[number] = version
        group.append(number)

    def count(self, versions: NDArray[Any], sign: int) -> None:
        """Note that samples of these versions came (+1) or went (-1)."""
        distinct, counts = np.unique(versions, return_counts=True)
        for version, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            before = self._samples.get(version, 0)
            self._samples[version] = before + sign * count
            if before == 0:
                insort(self.versions, version)
            elif self._samples[version] == 0:
                del self._samples[version]
                del self.versions[bisect_left(self.versions, version)]

    def check_valid(self, newest: NDArray[Any], versions: NDArray[Any]) -> None:
        """Assert that this agrees with each query's newest version and each sample's version."""
        distinct, counts = np.unique(versions, return_counts=True)
        assert self.versions == distinct.tolist()
        assert self._samples == dict(zip(self.versions, counts.tolist(), strict=True))
        assert self._group_of.tolist() == newest.tolist()
        for version, group in self._groups.items():
            assert sorted(group) == np.flatnonzero(newest == version).tolist()
            assert [self._place[number] for number in group] == list(range(len(group)))

    def newest(self, count: int) -> Recent:
        """Return the queries with samples of the newest `count` versions."""
        versions = self.versions[-count:]
        groups = [self._groups[version] for version in versions if version in self._groups]
        return Recent(versions[0] if versions else 0, groups)
