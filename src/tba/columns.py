"""Arithmetic on the buffer's columns: growing, ragged rows, keys of token sequences."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tba.records import Int32, Int64


class Growing:
    """A one-dimensional array with room to grow; memory that was never written is not taken."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.data: NDArray[Any] = np.empty(0, dtype=dtype)
        self.size = 0

    @property
    def rows(self) -> NDArray[Any]:
        """The part in use."""
        return self.data[: self.size]

    def extend(self, count: int) -> NDArray[Any]:
        """Take `count` more rows, return them to be filled."""
        end = self.size + count
        if end > len(self.data):
            grown = np.empty(max(end, len(self.data) * 3 // 2), dtype=self.data.dtype)
            grown[: self.size] = self.rows
            self.data = grown
        self.size = end
        return self.data[end - count : end]


def sequence_keys(query_id: Int64, tokens: Int32, offsets: Int64) -> NDArray[np.uint64]:
    """Hash each row's query and tokens to 64 bits.

    Equal keys are taken for equal sequences: among ten million trajectories, each compared with 100
    of its query, two different ones share a key with probability 1e9 / 2^64 = 5e-11.
    """
    lengths = np.diff(offsets)
    position = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)
    mixed = _mix((position.astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint32))
    sums = np.concatenate(
        [np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)]
    )  # modulo 2^64
    salt = _mix(~query_id.astype(np.uint64))  # its top bit is set, that of no token's number is
    return _mix(sums[offsets[1:]] - sums[offsets[:-1]] + salt)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64-bit numbers (the finaliser of splitmix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def lowest(values: NDArray[Any], count: int) -> Int64:
    """Return the positions of the lowest values; of equal ones at the border the first."""
    border = np.partition(values, count - 1)[count - 1]
    below = np.flatnonzero(values < border)
    at_border = np.flatnonzero(values == border)
    return np.concatenate([below, at_border[: count - len(below)]])


def last_of_each(keys: NDArray[np.uint64]) -> Int64:
    """Return the position of the last occurrence of each distinct key, ascending."""
    order = np.argsort(keys, kind="stable")
    return np.sort(order[_ends_of_runs(keys[order])])


def occurrences(*columns: NDArray[Any]) -> Int64:
    """Return how often each row, a value of every column, occurs among all of them."""
    order = np.lexsort(columns)
    ends = np.zeros(len(order), dtype=np.bool_)
    for column in columns:
        ends |= _ends_of_runs(column[order])
    run: Int64 = np.cumsum(ends) - ends
    counts = np.empty(len(order), dtype=np.int64)
    counts[order] = np.bincount(run)[run] if len(order) else 0
    return counts


def _ends_of_runs(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which of the values differ from the next one; the last one does."""
    ends = np.ones(len(values), dtype=np.bool_)
    ends[:-1] = values[1:] != values[:-1]
    return ends


def places_among(wanted: NDArray[Any], values: NDArray[Any]) -> Int64:
    """Return where each value is among the wanted ones, of which there is one at least; or -1."""
    order = np.argsort(wanted)
    wanted = wanted[order]
    place = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
    return np.where(wanted[place] == values, order[place], -1)


def ranges(starts: Int64, lengths: NDArray[Any]) -> Int64:
    """Return [s, s + 1, ..., s + n - 1] for each start and length, end to end."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
