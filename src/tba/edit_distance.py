"""Which sequences are near by edit distance: d(a, b) < share (|a| + |b|).

d is Levenshtein's distance in tokens; the end-of-sequence token does not count. The search is
exact. Most pairs are told apart by marks: a token sets one of 256 bits of its sequence's mark, and
each bit of one mark that is missing in the other takes an edit of its own, so that

    d(a, b) >= max(bits(a), bits(b)) - bits(a and b)

The rest is compared by rapidfuzz's bit-parallel algorithm, a token being a character.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from tba.records import Int32, Int64
from tba.run.rollouts import flatten

_WORDS = 4  # of 64 bits, in a mark
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbours get bits far apart


class EditDistance:
    """The nearness of `tba.near_duplicates` by edit distance."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._texts: list[str] = []  # by slot
        self._marks = np.zeros((0, _WORDS), dtype=np.uint64)  # [slot, word]

    def read(self, scored: pa.RecordBatch, rows: NDArray[Any]) -> list[str]:
        """Return each row's tokens as characters, without the end-of-sequence token."""
        values, offsets = flatten(scored["tokens"])
        ends = (offsets[1:] - rows["finished"]).tolist()
        return [as_text(values[a:b]) for a, b in zip(offsets[:-1].tolist(), ends, strict=True)]

    def near(self, arrivals: Sequence[str], kept: NDArray[Any]) -> list[list[tuple[float, int]]]:
        """Return for each arrival what is near: slots, and ~i for earlier arrivals."""
        texts = [self._texts[slot] for slot in kept.tolist()]
        held = _Marked(texts, np.ascontiguousarray(self._marks[kept].T))
        marks = marks_of(arrivals)
        found = []
        for at, (text, mark) in enumerate(zip(arrivals, marks, strict=True)):
            maybe = held.maybe(mark, self._share, text)
            slots = [(d, int(kept[i])) for d, i in self._nearest(text, maybe, texts)]
            earlier = [(d, ~i) for d, i in self._nearest(text, np.arange(at), arrivals)]
            found.append(slots + earlier)
        return found

    def keep(self, slots: Int64, entries: Sequence[str]) -> None:
        """Note the tokens of slots."""
        if len(slots) and (missing := int(slots.max()) + 1 - len(self._texts)) > 0:
            self._texts += [""] * missing
        if len(self._texts) > len(self._marks):
            grown = np.zeros((2 * len(self._texts), _WORDS), dtype=np.uint64)
            grown[: len(self._marks)] = self._marks
            self._marks = grown
        self._marks[slots] = marks_of(entries)
        for slot, text in zip(slots.tolist(), entries, strict=True):
            self._texts[slot] = text

    def _nearest(
        self, text: str, positions: Int64, texts: Sequence[str]
    ) -> list[tuple[float, int]]:
        """Return those of some texts that are near one, as (d / (|a| + |b|), position)."""
        if not len(positions):
            return []
        others = [texts[i] for i in positions.tolist()]
        together = np.array([len(other) for other in others]) + len(text)
        cutoff = int(self._share * together.max())  # beyond it the distance is not computed
        distance = cdist(
            [text], others, scorer=Levenshtein.distance, score_cutoff=cutoff, dtype=np.int32
        )[0]
        near = np.flatnonzero(distance < self._share * together)
        return [
            (d / of, i)
            for d, of, i in zip(
                distance[near].tolist(),
                together[near].tolist(),
                positions[near].tolist(),
                strict=True,
            )
        ]


class _Marked:
    """What a query has, with all that the bound needs."""

    def __init__(self, texts: Sequence[str], marks: NDArray[np.uint64]) -> None:
        self._marks = marks  # [word, text]
        self._bits = np.bitwise_count(marks).sum(axis=0, dtype=np.int32)
        self._lengths = np.array([len(text) for text in texts], dtype=np.int32)

    def maybe(self, mark: NDArray[np.uint64], share: float, text: str) -> Int64:
        """Return the positions of the texts that the bound does not tell apart from one."""
        common = np.zeros(len(self._bits), dtype=np.int32)
        for word, own in zip(self._marks, mark, strict=True):
            common += np.bitwise_count(word & own)
        least = np.maximum(self._bits, int(np.bitwise_count(mark).sum())) - common
        return np.flatnonzero(least < share * (self._lengths + len(text)))


def as_text(tokens: Int32) -> str:
    """Return a string of a character for each token; there are 1,114,112 characters."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def marks_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return the marks of texts; [text, word]."""
    tokens = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(
        np.uint64
    )
    place = (tokens * _SPREAD) >> np.uint64(56)  # [token], 0 .. 255
    owner = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    marks = np.zeros((len(texts), _WORDS), dtype=np.uint64)
    bit = np.uint64(1) << (place & np.uint64(63))
    np.bitwise_or.at(marks, (owner, (place >> np.uint64(6)).astype(np.int64)), bit)
    return marks
