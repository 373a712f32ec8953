"""Discrete events: processes that work on shared processors, sleep, and wait for signals.

A process is a generator. What it yields says when it goes on: `Processors.work`, `Timers.sleep` or
a `Signal`. Everything is deterministic: what happens at the same time happens in the order in which
it was asked for.

Processors are shared as an operating system shares them (egalitarian processor sharing): n busy
threads on c places each run at speed min(1, c / n), less the slowdown that was measured when two of
them are busy at all. Threads of one speed finish in the order of their remaining work, so the clock
of a kind counts work instead of time, and an event costs O(log n) whatever is running.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Need(Protocol):
    """What a process yields: the reason for which it stands still."""

    def begin(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when the process may go on; perhaps at once."""
        ...


Process = Generator[Need, None, None]


def run_process(process: Process) -> None:
    """Let a process go on until its next need, or its end."""
    need = next(process, None)
    if need is not None:
        need.begin(lambda: run_process(process))


class Signal:
    """Something that processes wait for; each firing wakes all who wait at that moment."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def begin(self, resume: Callable[[], None]) -> None:
        """Wait for the next firing."""
        self._waiting.append(resume)

    def fire(self) -> None:
        """Wake whoever waits."""
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class Source(Protocol):
    """Where events come from."""

    def next_s(self, now_s: float) -> float:
        """Return when the next event happens, infinity if none does."""
        ...

    def advance(self, now_s: float, to_s: float) -> None:
        """Let time pass; nothing happens in between."""
        ...

    def happen(self, now_s: float) -> None:
        """Let one event that is due happen."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A need that is passed on to whoever fulfils it."""

    ask: Callable[[Callable[[], None]], None]

    def begin(self, resume: Callable[[], None]) -> None:
        self.ask(resume)


class Timers:
    """Sleeping, and work on a machine of one's own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds since the start."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def sleep(self, seconds: float) -> Need:
        """Stand still for that long."""
        return _Asked(
            lambda resume: heapq.heappush(
                self._heap, (self.now_s + seconds, next(self._order), resume)
            )
        )

    def next_s(self, now_s: float) -> float:
        """Return when the next sleeper wakes."""
        del now_s
        return self._heap[0][0] if self._heap else math.inf

    def advance(self, now_s: float, to_s: float) -> None:
        """Let time pass."""
        del now_s
        self.now_s = to_s

    def happen(self, now_s: float) -> None:
        """Wake one sleeper."""
        del now_s
        heapq.heappop(self._heap)[2]()


class Kind(IntEnum):
    """Threads that share processors, by how they run."""

    INTERPRETER = 0
    """The trainer's process: of its threads one runs at a time."""
    NATIVE = 1
    """A thread of the trainer that needs no interpreter: hashing."""
    SEARCHER = 2
    """A searcher's process with its scoring process, which takes turns with it."""


class Processors:
    """Places on which threads run, shared evenly among those that are busy."""

    def __init__(
        self, places: float, slowdown: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ) -> None:
        self._places = places
        self._slowdown = slowdown
        self._work = [0.0 for _ in Kind]  # done by each thread of a kind that was always busy
        self._busy: list[list[tuple[float, int, Callable[[], None]]]] = [[] for _ in Kind]
        self._order = itertools.count()

    def work(self, kind: Kind, seconds: float) -> Need:
        """Work as much as takes a thread that is alone that many seconds."""
        return _Asked(
            lambda resume: heapq.heappush(
                self._busy[kind], (self._work[kind] + seconds, next(self._order), resume)
            )
        )

    def speed(self, kind: Kind) -> float:
        """Return the present speed of a thread of this kind; 1 is that of one that is alone."""
        interpreted, native, searching = map(len, self._busy)
        running = min(interpreted, 1) + native + searching
        share = min(1.0, self._places / running) if running else 1.0
        if running > 1:
            share /= self._slowdown[kind]
        return share / max(interpreted, 1) if kind is Kind.INTERPRETER else share

    def next_s(self, now_s: float) -> float:
        """Return when the next piece of work is done, if no other begins."""
        return now_s + self._soonest()[0]

    def advance(self, now_s: float, to_s: float) -> None:
        """Let the busy threads work."""
        speeds = [self.speed(kind) for kind in Kind]
        for kind in Kind:
            if self._busy[kind]:
                self._work[kind] += (to_s - now_s) * speeds[kind]
            else:
                self._work[kind] = 0.0  # so that the clock keeps its precision

    def happen(self, now_s: float) -> None:
        """Let one thread be done."""
        del now_s
        heapq.heappop(self._busy[self._soonest()[1]])[2]()

    def _soonest(self) -> tuple[float, Kind]:
        """Return in how many seconds which kind is done first."""
        return min(
            (
                (max(self._busy[kind][0][0] - self._work[kind], 0.0) / self.speed(kind), kind)
                for kind in Kind
                if self._busy[kind]
            ),
            default=(math.inf, Kind.SEARCHER),
        )


def play(timers: Timers, sources: list[Source], until: Callable[[], bool]) -> None:
    """Let events happen in their order until a condition holds or nothing is left to happen."""
    everything = [timers, *sources]
    while not until():
        now_s = timers.now_s
        when_s, first = min(
            ((source.next_s(now_s), i) for i, source in enumerate(everything)),
        )
        if when_s == math.inf:
            return
        for source in everything:
            source.advance(now_s, when_s)
        everything[first].happen(when_s)
