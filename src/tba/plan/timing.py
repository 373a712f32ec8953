"""How things are timed: again and again for about a window, on a machine that may not be quiet.

The seconds that a thread was ready and another had its processor are not its cost: the kernel
counts them, and they are taken off. What is left of an outside program's doing is what it does to
caches and memory.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


def kept_waiting_s(thread: str = "thread-self") -> float:
    """Return the seconds for which a thread was ready to run and did not; 0 if nobody counts them.

    Args:
        thread: The present one, or the number of a process, for its main thread.
    """
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # not a Linux, or a kernel without these figures
        return 0.0


def own_s() -> float:
    """Return the time, stopped while this thread is kept from running."""
    return time.perf_counter() - kept_waiting_s()


@dataclass(slots=True)
class Stopwatch:
    """Seconds by stage, told as a searcher tells the watchdog."""

    seconds: defaultdict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    """Since the last `take`."""
    _stage: Stage = Stage.WAITING
    _since: float = 0.0

    def announce(self, stage: Stage) -> None:
        """Begin a stage."""
        now = own_s()
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
