"""One process for the trainer and one for each searcher, on one machine.

Weights come through shared memory (`tba.sync`), rounds and signs of life through a shared board,
trajectories through one pipe a searcher, so that killing a searcher can damage nothing but its own
pipe. A thread a pipe reads it, so that a searcher which stalls in the middle of a message keeps
nobody else waiting. An intake thread makes the trajectories durable in the rollout log and only
then hands them on; it replaces searchers that died, names those that stall, and kills those that
stall beyond the bound. Gradients, where searchers send them, wait in a short queue for the trainer;
they are not logged, so those under way when a run ends are lost, a step each; their trajectories
are not.

Searchers end when the trainer's process does, however it ends.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, Full, Queue
from typing import Self

import pyarrow as pa
import torch.multiprocessing

from tba.config import LocalRuntimeConfig
from tba.errors import SearcherFailedError, TbaError, UserError
from tba.pace import NO_ROUND, longest_silence_s
from tba.records import Batch
from tba.run.rollouts import RolloutLog, from_bytes
from tba.runtimes.base import SearchStatus
from tba.runtimes.board import Board
from tba.runtimes.lanes import SearchPlan
from tba.runtimes.searcher_process import Delivery, Failure, SearcherSeat, searcher_main
from tba.searcher import Stage

log = logging.getLogger(__name__)

POLL_S = 0.1
LAST_BREATH_S = 1.0  # between the end of a pipe and that of its process
INBOX_MESSAGES = 64  # read and not yet taken in; beyond, searchers wait in their pipes
FAREWELL_S = 5.0  # how long searchers may take to finish their present batch at the end

Message = Delivery | Failure | Batch | None
"""What comes through a searcher's pipe; None is its end."""


@dataclass(slots=True)
class LaneProcess:
    """The trainer's view of one searcher's process."""

    lane: int
    process: BaseProcess
    pipe: Connection
    """Read and closed by a thread of its own, nowhere else."""
    next_ticket: int
    ended: int = NO_ROUND
    deaths_in_a_row: int = 0
    ended_pipe: bool = False
    abandoned: bool = False
    warned_at_s: float = 0.0
    condemned: bool = False
    """Whether it has been killed for being silent."""

    def __str__(self) -> str:
        return f"searcher {self.lane} (process {self.process.pid})"


class LocalRuntime:
    """Searchers in processes of their own."""

    def __init__(
        self,
        plan: SearchPlan,
        rollouts: RolloutLog,
        *,
        devices: Sequence[str],
        threads: int,
        log_folder: str,
    ) -> None:
        self._plan = plan
        self._rollouts = rollouts
        self._devices = devices
        self._threads = threads
        self._log_folder = log_folder
        assert isinstance(plan.config.runtime, LocalRuntimeConfig)
        self._max_deaths = plan.config.runtime.max_restarts
        self._stall_warning_s = plan.config.sync.stall_warning_s
        self._longest_silence_s = longest_silence_s(plan.config)
        self._context = torch.multiprocessing.get_context("spawn")
        self._board = Board(plan.config.search.searchers)
        self._lanes: list[LaneProcess] = []
        self._intake = threading.Thread(
            target=self._take_in_until_stopped, name="intake", daemon=True
        )
        self._inbox: Queue[tuple[Connection, Delivery | Failure | None]] = Queue(INBOX_MESSAGES)
        self._gradients: Queue[Batch] = Queue(plan.config.search.searchers)
        self._arrival = threading.Condition()  # guards the four below
        self._arrived: list[pa.RecordBatch] = []
        self._error: TbaError | None = None
        self._tokens = 0
        self._restarts = 0
        self._opened_at = self._watched_at = time.monotonic()

    def __enter__(self) -> Self:
        """Start every searcher and the intake thread."""
        self._intake.start()
        try:
            for lane in range(self._plan.config.search.searchers):
                ticket = self._plan.first_ticket(lane)
                process, pipe = self._start(lane, ticket, NO_ROUND)
                self._lanes.append(LaneProcess(lane, process, pipe, ticket))
                self._listen(self._lanes[-1])
        except BaseException:  # nobody will leave a context that was never entered
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End every searcher; what they have delivered by then is kept."""
        with self._arrival:  # from now on no searcher is replaced
            self._board.stop()
        deadline = time.monotonic() + FAREWELL_S
        for lane in self._lanes:
            lane.process.join(max(deadline - time.monotonic(), 0.0))
            if lane.process.is_alive():
                lane.process.kill()
                lane.process.join(FAREWELL_S)
        self._intake.join(FAREWELL_S)
        if not self._intake.is_alive():  # it may have failed: no reader shall wait for it for ever
            while not self._inbox.empty():
                self._inbox.get_nowait()

    def open_round(self, number: int) -> None:
        """Let the searchers search round `number`."""
        self._opened_at = time.monotonic()
        self._board.opened = number

    def close_round(self, number: int) -> None:
        """Ask the searchers to deliver round `number`."""
        self._board.closing = number

    def receive(self, timeout_s: float) -> list[pa.RecordBatch]:
        """Return what has arrived and is durable; wait up to `timeout_s` for the first."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._arrived or self._error, timeout_s)
            arrived, self._arrived = self._arrived, []
            if self._error is not None and not arrived:
                raise self._error
            return arrived

    def next_gradient(self) -> Batch | None:
        """Return the oldest batch with a gradient that has arrived."""
        try:
            return self._gradients.get_nowait()
        except Empty:
            return None

    def waiting_for(self, number: int) -> list[str]:
        """Name the searchers that have not delivered round `number`; all, if there is no round."""
        behind = [
            lane
            for lane in self._lanes
            if not lane.abandoned and (number == NO_ROUND or lane.ended < number)
        ]
        return [self._describe(lane) for lane in behind]

    def status(self) -> SearchStatus:
        """Return totals."""
        notices = [self._board.read(lane.lane) for lane in self._lanes]
        return SearchStatus(
            tokens=self._tokens,
            busy_s=sum(notice.busy_s for notice in notices),
            idle_s=sum(notice.idle_s for notice in notices),
            alive=sum(lane.process.is_alive() for lane in self._lanes),
            restarts=self._restarts,
        )

    def _describe(self, lane: LaneProcess) -> str:
        notice = self._board.read(lane.lane)
        late = notice.stage is Stage.WAITING and self._board.opened > lane.ended
        doing = "not taking up its round" if late else notice.stage
        return f"{lane}, {doing} for {self._silent_s(lane) if late else notice.age_s:.1f} s"

    def _start(self, lane: int, first_ticket: int, ended: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe(duplex=False)
        seat = SearcherSeat(
            lane=lane,
            first_ticket=first_ticket,
            ended=ended,
            device=self._devices[lane % len(self._devices)],
            threads=self._threads,
            log_file=f"{self._log_folder}/searcher-{lane}.log",
        )
        process = self._context.Process(
            target=searcher_main,
            args=(self._plan, seat, self._board, theirs),
            name=f"searcher-{lane}",
            daemon=False,  # it has a scoring process of its own
        )
        self._board.seat(lane)
        # A new process inherits what is blocked, so that Ctrl-C finds none that is still starting.
        resource_tracker.ensure_running()  # unblocks signals when it starts, so it starts first
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the end of the process is the end of the pipe
        return process, ours

    def _listen(self, lane: LaneProcess) -> None:
        """Read the lane's present pipe from now on."""
        name = f"pipe-{lane.lane}"
        reader = threading.Thread(
            target=_read, args=(lane.pipe, self._sort), name=name, daemon=True
        )
        reader.start()

    def _sort(self, pipe: Connection, message: Message) -> None:
        """Pass what came through a pipe to the intake thread, a gradient to the trainer."""
        if isinstance(message, Batch):
            self._offer(message)
        else:
            self._inbox.put((pipe, message))

    def _offer(self, batch: Batch) -> None:
        """Keep a gradient for the trainer; its searcher waits meanwhile. Lost when all ends."""
        while not self._board.stopping:
            with suppress(Full):
                self._gradients.put(batch, timeout=POLL_S)
                return

    # --- the intake thread ---

    def _take_in_until_stopped(self) -> None:
        try:
            while not self._finished():
                self._take_in()
                if not self._board.stopping and time.monotonic() >= self._watched_at + POLL_S:
                    self._watch()
                    self._watched_at = time.monotonic()
        except TbaError as error:
            self._fail(error)
        except Exception as error:  # the boundary: a thread that ends must not end silently
            log.exception("taking in trajectories failed")
            self._fail(SearcherFailedError(f"trajectories cannot be taken in any more: {error!r}"))

    def _finished(self) -> bool:
        return self._board.stopping and all(
            lane.abandoned or lane.ended_pipe for lane in self._lanes
        )

    def _take_in(self) -> None:
        """Take what was read from the pipes, make it durable together, hand it on."""
        deliveries: list[tuple[LaneProcess, Delivery]] = []
        failures: list[tuple[LaneProcess, Failure]] = []
        for pipe, message in self._messages():
            lane = next(lane for lane in self._lanes if lane.pipe is pipe)  # may be newly added
            if message is None:
                lane.ended_pipe = True
            elif isinstance(message, Failure):
                failures.append((lane, message))
            else:
                deliveries.append((lane, message))
        if deliveries:
            self._hand_on(deliveries)
        for lane, failure in failures:
            self._take_failure(lane, failure)
        for lane in self._lanes:
            if lane.ended_pipe and not (lane.abandoned or self._board.stopping):
                self._bury(lane)

    def _messages(self) -> Iterator[tuple[Connection, Delivery | Failure | None]]:
        """Yield what was read, at most an inbox full; wait a little for the first."""
        try:
            yield self._inbox.get(timeout=POLL_S)
            for _ in range(INBOX_MESSAGES):
                yield self._inbox.get_nowait()
        except Empty:
            return

    def _hand_on(self, deliveries: list[tuple[LaneProcess, Delivery]]) -> None:
        payloads = [delivery.payload for _, delivery in deliveries]
        batches = [from_bytes(payload) for payload in payloads]
        self._rollouts.append_all(payloads)
        with self._arrival:
            self._arrived += batches
            for lane, delivery in deliveries:
                lane.next_ticket = delivery.next_ticket
                lane.ended = delivery.ended
                lane.deaths_in_a_row = 0
                self._tokens += delivery.tokens
            self._arrival.notify_all()

    def _take_failure(self, lane: LaneProcess, failure: Failure) -> None:
        if isinstance(failure.error, UserError):
            raise failure.error
        log.error("%s failed: %s\n%s", lane, failure.error, failure.trace)

    def _bury(self, lane: LaneProcess) -> None:
        """Put a new searcher in the place of a dead one."""
        lane.process.join(LAST_BREATH_S)
        how = _how_it_ended(lane.process.exitcode)
        lane.process.kill()  # should it have closed its pipe and nothing else
        lane.deaths_in_a_row += 1
        doing = self._board.read(lane.lane).stage
        if lane.deaths_in_a_row > self._max_deaths:
            lane.abandoned = True
            log.error("%s %s while %s; it died too often and is not replaced", lane, how, doing)
            if all(other.abandoned for other in self._lanes):
                raise SearcherFailedError(
                    f"every searcher died {self._max_deaths + 1} times in a row without a "
                    f"delivery (the last one {how} "
                    f"while {doing}): look into {self._log_folder}/searcher-{lane.lane}.log"
                )
            return
        log.warning("%s %s while %s; a new one takes its place", lane, how, doing)
        with self._arrival:
            if not self._board.stopping:
                lane.process, lane.pipe = self._start(lane.lane, lane.next_ticket, lane.ended)
                lane.ended_pipe = lane.condemned = False
                self._listen(lane)
                self._restarts += 1

    def _watch(self) -> None:
        """Name searchers without a sign of life; kill those beyond the bound."""
        for lane in self._lanes:
            silent_s = self._silent_s(lane)
            if lane.abandoned or lane.condemned or silent_s < self._stall_warning_s:
                lane.warned_at_s = 0.0
            elif silent_s > self._longest_silence_s:
                log.error("%s; killing it", self._describe(lane))
                lane.condemned = True
                lane.process.kill()
            elif silent_s > 2 * lane.warned_at_s:
                log.warning("no sign of life: %s", self._describe(lane))
                lane.warned_at_s = silent_s

    def _silent_s(self, lane: LaneProcess) -> float:
        """Return for how long a searcher has been silent although there was something to do.

        One that waits for the trainer, who may evaluate for long, is silent from the moment a round
        is opened that it does not take up.
        """
        notice = self._board.read(lane.lane)
        if notice.stage is Stage.SENDING:
            return 0.0
        if notice.stage is not Stage.WAITING:
            return notice.age_s
        if self._board.opened <= lane.ended:
            return 0.0
        return min(notice.age_s, time.monotonic() - self._opened_at)

    def _fail(self, error: TbaError) -> None:
        with self._arrival:
            self._error = error
            self._arrival.notify_all()


def _read(pipe: Connection, take: Callable[[Connection, Message], None]) -> None:
    """Pass on what comes through a pipe and, at its end, None."""
    with pipe:
        try:
            while True:
                take(pipe, pipe.recv())
        except (EOFError, OSError):
            pass
    take(pipe, None)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe"
    return (
        f"was killed by signal {-exit_code}"
        if exit_code < 0
        else f"ended with exit code {exit_code}"
    )
