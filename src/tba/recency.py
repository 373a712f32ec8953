"""Which queries are recent, and which are little used: an index of the buffer's queries.

Each query is filed once under the newest version among its samples, and once under the least use
among them. So the queries within a bound are whole groups; to find them takes the number of groups,
and to pick one of them the logarithm of it, however many queries there are.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.records import Int64

_PROBES = 32
_GOOD_PART = 0.25


class Members(Sequence[int]):
    """The queries of some groups; valid until the next change."""

    def __init__(self, groups: Sequence["array[int]"]) -> None:
        self._groups = groups
        self._ends = list(accumulate(map(len, groups)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, position: Any) -> Any:
        at = bisect_right(self._ends, position)
        if at == len(self._ends):
            raise IndexError(position)
        return self._groups[at][position - (self._ends[at - 1] if at else 0)]

    def all(self) -> Int64:
        """Return them as an array."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._groups])


class Recent(Members):
    """Queries with samples of the newest policy versions; valid until the next `add`."""

    def __init__(self, oldest_version: int, groups: Sequence["array[int]"]) -> None:
        super().__init__(groups)
        self.oldest_version = oldest_version
        """Samples from this version on are the recent ones."""


class Groups:
    """Queries by a number that each of them has."""

    def __init__(self) -> None:
        self._keys: list[int] = []  # ascending
        self._groups: dict[int, array[int]] = {}
        self._key_of = array("i")  # by query; -1: in no group yet
        self._place = array("i")  # by query: its position in the group

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, the few Python objects left out."""
        return sum(4 * len(a) for a in (self._key_of, self._place, *self._groups.values()))

    def add_queries(self, count: int) -> None:
        """Make room for `count` more queries, in no group yet."""
        self._key_of.extend([-1] * count)
        self._place.extend([-1] * count)

    def move(self, query: int, key: int) -> None:
        """File a query under a key, not negative."""
        old = self._key_of[query]
        if old == key:
            return
        if old >= 0:
            self._take_out(query, old)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = array("i")
            insort(self._keys, key)
        self._place[query] = len(group)
        self._key_of[query] = key
        group.append(query)

    def from_key(self, key: int) -> list["array[int]"]:
        """Return the groups of this key and of larger ones."""
        return [self._groups[k] for k in self._keys[bisect_left(self._keys, key) :]]

    def below_key(self, key: int) -> list["array[int]"]:
        """Return the groups of smaller keys."""
        return [self._groups[k] for k in self._keys[: bisect_left(self._keys, key)]]

    def check_valid(self, key_of: NDArray[Any]) -> None:
        """Assert that this agrees with each query's key."""
        assert self._key_of.tolist() == key_of.tolist()
        assert self._keys == np.unique(key_of).tolist()
        for key in self._keys:
            group = self._groups[key]
            assert sorted(group) == np.flatnonzero(key_of == key).tolist()
            assert [self._place[query] for query in group] == list(range(len(group)))

    def _take_out(self, query: int, key: int) -> None:
        group = self._groups[key]
        last = group.pop()
        if last != query:  # the last one takes the place that becomes free
            group[self._place[query]] = last
            self._place[last] = self._place[query]
        if not group:
            del self._groups[key]
            del self._keys[bisect_left(self._keys, key)]


def good_part(queries: Sequence[int], fits: Callable[[Int64], NDArray[np.bool_]]) -> bool:
    """Guess from a few of the queries whether so many fit that trying them at random is quick."""
    if not queries:
        return False
    probes = [queries[i * len(queries) // _PROBES] for i in range(_PROBES)]
    return bool(fits(np.array(probes)).mean() > _GOOD_PART)


class Recency:
    """The policy versions held, and each query under the newest version of its samples."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        """Distinct versions among the samples, ascending."""
        self.queries = Groups()
        """By the newest version among their samples."""
        self._samples: dict[int, int] = {}  # version -> how many samples

    def count(self, versions: NDArray[Any], sign: int) -> None:
        """Note that samples of these versions came (+1) or went (-1)."""
        for version, count in Counter(versions.tolist()).items():
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
        assert self._samples == dict(zip(distinct.tolist(), counts.tolist(), strict=True))
        self.queries.check_valid(newest)

    def newest(self, count: int) -> Recent:
        """Return the queries with samples of the newest `count` versions."""
        oldest = self.versions[-count:][0] if self.versions else 0
        return Recent(oldest, self.queries.from_key(oldest))
