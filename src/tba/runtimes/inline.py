"""One process in which searching and training take turns: the bit-deterministic reference.

`receive` gives one lane one turn. In `free` mode, therefore, a search batch of one lane alternates
with a trainer step.
"""

import time
from collections import deque
from contextlib import ExitStack
from typing import Self

import pyarrow as pa

from tba.pace import NO_ROUND, Lane
from tba.records import Batch
from tba.run.rollouts import RolloutLog, encode
from tba.runtimes.base import SearchStatus
from tba.runtimes.lanes import SearchPlan, open_lane
from tba.searcher import Seat


class InlineRuntime:
    """Searchers in the trainer's own process and thread."""

    def __init__(self, plan: SearchPlan, rollouts: RolloutLog, device: str) -> None:
        self._plan = plan
        self._rollouts = rollouts
        self._device = device
        self._lanes: list[Lane] = []
        self._opened = self._closing = NO_ROUND
        self._tokens = 0
        self._busy_s = 0.0
        self._sent: deque[Batch] = deque()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Load the searchers."""
        for lane in range(self._plan.config.search.searchers):
            seat = Seat(lane, announce=lambda stage: None, send=self._sent.append)
            opening = open_lane(self._plan, seat, self._plan.first_ticket(lane), self._device)
            self._lanes.append(self._stack.enter_context(opening))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the searchers; none has a turn any more."""
        self._lanes.clear()
        self._stack.close()

    def open_round(self, number: int) -> None:
        """Let the lanes search round `number` in their next turns."""
        self._opened = number

    def close_round(self, number: int) -> None:
        """Ask the lanes to deliver round `number` in their next turns."""
        self._closing = number

    def receive(self, timeout_s: float) -> list[pa.RecordBatch]:
        """Give the next lane that has something to do one turn, and return what it delivers."""
        del timeout_s  # nobody else is at work, so there is nothing to wait for
        for lane in sorted(self._lanes, key=lambda lane: lane.next_ticket):  # as after a resume
            started = time.perf_counter()
            found = lane.turn(self._opened, self._closing)
            if found is not None:
                self._busy_s += time.perf_counter() - started
                self._tokens += sum(len(trajectory.tokens) for trajectory in found)
                return self._store(encode(found)) if found else []
        return []

    def next_gradient(self) -> Batch | None:
        """Return what the lane that had the last turn has sent."""
        return self._sent.popleft() if self._sent else None

    def waiting_for(self, number: int) -> list[str]:
        """Name the lanes that have not delivered round `number` yet."""
        return [f"searcher {i}" for i, lane in enumerate(self._lanes) if lane.ended < number]

    def status(self) -> SearchStatus:
        """Return totals."""
        return SearchStatus(
            tokens=self._tokens, busy_s=self._busy_s, idle_s=0.0, alive=len(self._lanes), restarts=0
        )

    def _store(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        self._rollouts.append(batch)
        return [batch]
