"""How things are timed: again and again for about a window."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tba.searcher import Stage

WINDOW_S = 2.0
"""About how long each thing is measured at a time."""
LEAST, MOST = 3, 200
"""Repetitions within a window."""

T = TypeVar("T")


def repeated(do: Callable[[], T]) -> Iterator[T]:
    """Do something for about a window; yield what it returns."""
    started = time.perf_counter()
    for count in range(MOST):
        if count >= LEAST and time.perf_counter() - started > WINDOW_S:
            return
        yield do()


@dataclass(slots=True)
class Stopwatch:
    """Seconds by stage, told as a searcher tells the watchdog."""

    seconds: defaultdict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    """Since the last `take`."""
    _stage: Stage = Stage.WAITING
    _since: float = 0.0

    def announce(self, stage: Stage) -> None:
        """Begin a stage."""
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def take(self) -> Mapping[Stage, float]:
        """End the present stage; return the seconds of all but waiting."""
        self.announce(Stage.WAITING)
        seconds, self.seconds = self.seconds, defaultdict(float)
        del seconds[Stage.WAITING]
        return seconds


@dataclass(slots=True)
class Sides:
    """Mean seconds of something, window by window, alone and beside something else."""

    alone: list[float] = field(default_factory=list)
    """With nothing else busy."""
    beside: list[float] = field(default_factory=list)
    """With something else busy."""

    def slowdown(self) -> float:
        """Return how many times longer it takes beside the other; 1 if not at all."""
        return max(1.0, statistics.median(self.beside) / statistics.median(self.alone))
