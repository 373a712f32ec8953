"""Times search batches in a process of their own, as a run's searchers are.

    parent --settings, ticket--> child: opens a lane (policy, reference, task, scorer)
           --go--------------->         searches one batch ---> payload, seconds by stage

A batch costs more in a process that trains as well: its memory is full of other things.
"""

import dataclasses
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Self

import pyarrow as pa
import torch.multiprocessing
from transformers.utils.logging import disable_progress_bar

from tba.config import Config
from tba.errors import SearcherFailedError, TbaError, WaitTimeoutError
from tba.pace import Lane, longest_search_s
from tba.plan.profile import Measured
from tba.plan.timing import Stopwatch
from tba.run.rollouts import encode, from_bytes, to_bytes
from tba.runtimes.lanes import SearchPlan, open_lane
from tba.runtimes.resources import searcher_threads
from tba.searcher import Seat, Stage

END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Searched:
    """One search batch."""

    seconds: Mapping[Stage, float]
    """What it took, by stage."""
    payload: bytes
    """What was found, as it goes to the trainer."""

    @cached_property
    def found(self) -> pa.RecordBatch:
        """What was found."""
        return from_bytes(self.payload)

    @property
    def pull_s(self) -> float:
        """Seconds for which it took weights."""
        return self.seconds[Stage.TAKING_WEIGHTS]

    @property
    def work(self) -> Measured:
        """Its cost, weights apart."""
        lengths = self.found.column("tokens").value_lengths().to_numpy()
        seconds = sum(self.seconds.values()) - self.pull_s
        return Measured(seconds, int(lengths.sum()), int(lengths.max()))


@dataclass(frozen=True, slots=True)
class _Opening:
    """How the next batches are searched."""

    config: Config
    ticket: int


class SearchProbe:
    """A searcher's process that searches when it is told to; leaving the context ends it.

    Raises:
        TbaError: What failed in the process, as it would in the run.
        WaitTimeoutError: It did not answer within the longest time of a search.
    """

    def __init__(self, plan: SearchPlan, device: str) -> None:
        self._timeout_s = longest_search_s(plan.config)
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(
            target=_probe_main, args=(plan, device, self._theirs), name="searcher-probe"
        )

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_TIMEOUT_S)

    def open(self, config: Config, ticket: int) -> None:
        """Search by these settings from now on, beginning with this ticket."""
        self._ask(_Opening(config, ticket))

    def search(self) -> Searched:
        """Search one batch with the newest weights."""
        found = self._ask(None)
        assert isinstance(found, Searched)
        return found

    def _ask(self, message: _Opening | None) -> Searched | None:
        answer: Searched | TbaError | None
        try:
            self._pipe.send(message)
            if not self._pipe.poll(self._timeout_s):
                raise WaitTimeoutError(
                    f"a searcher did not answer within {self._timeout_s:g} s: look whether it can "
                    "load its model, or raise sync.timeout_s"
                )
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(END_TIMEOUT_S)
            raise SearcherFailedError(
                f"the process that measures search ended with exit code {self._process.exitcode}"
            ) from error
        if isinstance(answer, TbaError):
            raise answer
        return answer


def _probe_main(plan: SearchPlan, device: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends this
    disable_progress_bar()
    torch.set_num_threads(searcher_threads(plan.config))
    Thread(target=_end_with_parent, daemon=True).start()
    stopwatch = Stopwatch()
    seat = Seat(0, announce=stopwatch.announce, send=lambda batch: None)
    lane: Lane | None = None
    with ExitStack() as stack:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            try:
                if isinstance(message, _Opening):
                    stack.close()
                    own = dataclasses.replace(plan, config=message.config)
                    lane = stack.enter_context(open_lane(own, seat, message.ticket, device))
                    pipe.send(None)
                else:
                    assert lane is not None, "settings come first"
                    pipe.send(_search(lane, stopwatch))
            except TbaError as error:
                pipe.send(error)


def _search(lane: Lane, stopwatch: Stopwatch) -> Searched:
    stopwatch.take()
    found = lane.turn(0, 0)
    assert found, "nobody waits in free mode"
    stopwatch.announce(Stage.DELIVERING)
    payload = to_bytes(encode(found))
    return Searched(dict(stopwatch.take()), payload)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
