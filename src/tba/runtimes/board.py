"""The notice board of the local runtime: a few words of memory that all its processes share.

The trainer writes the round and the stop mark, each searcher its own row: what it is doing since
when, and its totals. Every word has one writer, so nobody needs a lock that a killed process could
hold for ever.
"""

import time
from dataclasses import dataclass

import torch

from tba.pace import NO_ROUND
from tba.searcher import Stage

STAGES = tuple(Stage)


@dataclass(frozen=True, slots=True)
class LaneNotice:
    """One searcher's row."""

    stage: Stage
    """What it is doing."""
    age_s: float
    """Seconds since it began that."""
    busy_s: float
    """Seconds spent searching so far."""
    idle_s: float
    """Seconds spent waiting so far."""


class Board:
    """Shared words; picklable for `torch.multiprocessing`, which passes the memory itself."""

    def __init__(self, lanes: int) -> None:
        self._trainer = torch.tensor(
            [NO_ROUND, NO_ROUND, 0]
        ).share_memory_()  # opened, closing, stopping
        # per lane: stage, since (ns), busy (ns), idle (ns)
        self._lanes = torch.zeros(lanes, 4, dtype=torch.int64).share_memory_()

    @property
    def opened(self) -> int:
        """Newest round opened."""
        return int(self._trainer[0])

    @opened.setter
    def opened(self, number: int) -> None:
        self._trainer[0] = number

    @property
    def closing(self) -> int:
        """Newest round asked for."""
        return int(self._trainer[1])

    @closing.setter
    def closing(self, number: int) -> None:
        self._trainer[1] = number

    @property
    def stopping(self) -> bool:
        """Whether searchers are to end."""
        return bool(self._trainer[2])

    def stop(self) -> None:
        """Ask every searcher to end after its present batch."""
        self._trainer[2] = 1

    def seat(self, lane: int) -> None:
        """Begin a searcher's row afresh, before its process starts; its totals go on."""
        self._lanes[lane, 0] = STAGES.index(Stage.LOADING)
        self._lanes[lane, 1] = time.monotonic_ns()

    def announce(self, lane: int, stage: Stage) -> None:
        """Write what a searcher begins to do, and book the time of what it did before."""
        row, now = self._lanes[lane], time.monotonic_ns()
        before = STAGES[int(row[0])]
        if before is not Stage.LOADING:
            row[3 if before in (Stage.WAITING, Stage.SENDING) else 2] += now - int(row[1])
        row[0], row[1] = STAGES.index(stage), now

    def read(self, lane: int) -> LaneNotice:
        """Return a searcher's row."""
        stage, since, busy, idle = self._lanes[lane].tolist()
        age = time.monotonic_ns() - since
        return LaneNotice(STAGES[stage], age / 1e9, busy / 1e9, idle / 1e9)
