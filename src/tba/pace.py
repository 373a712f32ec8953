"""Who waits for whom: the three sync modes, seen from searcher (`Lane`) and trainer (`Pace`).

A *round* is the time between two syncs, k trainer steps.

    free      Nobody waits. A lane delivers each search batch at once; the trainer takes in what has
              arrived.
    barrier   The paper's. A lane keeps what it finds in round r (its D_local) until the trainer, k
              steps later, asks for it; then the trainer publishes, and round r+1 starts. On the m
              branch staleness lies in [k, 2k-1].
    lockstep  Synchronous. A lane searches a fixed number of batches with the newest weights; only
              when all have delivered does the trainer take its k steps. Staleness lies in [0, k-1].

Both ends run the same code in every runtime.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import pyarrow as pa

from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.errors import AllExcludedError, WaitTimeoutError
from tba.records import Outcome, Trajectory

if TYPE_CHECKING:  # runtimes are built from lanes
    from tba.runtimes.base import Runtime

log = logging.getLogger(__name__)

Mode = Literal["free", "barrier", "lockstep"]
NO_ROUND = -1
POLL_S = 0.2
MAX_EXTRA_ROUNDS = 10
PATIENCE = 2
"""The trainer waits this many times as long as a silent searcher lives: another can come."""


def searches_per_round(config: Config) -> int:
    """Return how many search batches each lane makes between two syncs in lockstep mode."""
    if config.sync.searches_per_round is not None:
        return config.sync.searches_per_round
    consumed = config.sync.sync_every * config.trainer.queries_per_batch
    searched_at_once = config.search.searchers * config.search.queries_per_batch
    return -(-consumed // searched_at_once)


def longest_silence_s(config: Config) -> float:
    """Return how long a searcher may be silent, in seconds.

    It is silent for as long as an attempt at scoring goes on, or the loading of what scores where
    that has a setting; so the longer of the two comes on top of `sync.timeout_s`.
    """
    return config.sync.timeout_s + _longest_attempt_s(config)


def longest_search_s(config: Config) -> float:
    """Return how long a search batch may take: tried as a whole, it is scored one by one."""
    responses = config.search.queries_per_batch * config.search.samples_per_query
    return config.sync.timeout_s + (1 + responses) * _longest_attempt_s(config)


def _longest_attempt_s(config: Config) -> float:
    return max(config.task.reward_timeout_s, getattr(config.task, "loading_timeout_s", 0.0))


class SupportsSearch(Protocol):
    """A searcher."""

    def search(self, ticket: int) -> list[Trajectory]:
        """Return the trajectories of one search batch."""
        ...


class Lane:
    """One searcher's turns: when it searches, what it keeps in D_local, when it delivers."""

    def __init__(
        self,
        searcher: SupportsSearch,
        mode: Mode,
        *,
        searches_per_round: int,
        first_ticket: int,
        stride: int,
        ended: int = NO_ROUND,
    ) -> None:
        self._searcher = searcher
        self._mode = mode
        self._searches_per_round = searches_per_round
        self._ticket = first_ticket
        self._stride = stride
        self._local: list[Trajectory] = []  # D_local
        self._searched = 0  # batches in the present round
        self._ended = ended  # newest round delivered

    @property
    def ended(self) -> int:
        """The newest round that was delivered in full."""
        return self._ended

    @property
    def next_ticket(self) -> int:
        """The search batch that comes next, if what was found so far is delivered."""
        return self._ticket

    def turn(self, opened: int, closing: int) -> list[Trajectory] | None:
        """Search one batch if it is this lane's turn.

        Args:
            opened: Newest round the trainer has opened.
            closing: Newest round the trainer wants delivered.

        Returns:
            What goes to D_global now (possibly nothing yet), or None if there was nothing to do.
        """
        if self._mode == "free":
            return self._search()
        if opened == self._ended:
            return None
        if self._mode == "lockstep":
            found = self._search()
            if self._searched == self._searches_per_round:
                self._end(opened)
            return found
        if not (self._local and closing >= opened):
            self._local += self._search()
        if closing < opened:
            return []
        found, self._local = self._local, []
        self._end(opened)
        return found

    def leave(self) -> list[Trajectory]:
        """Return what is left in D_local."""
        found, self._local = self._local, []
        return found

    def _search(self) -> list[Trajectory]:
        found = self._searcher.search(self._ticket)
        self._ticket += self._stride
        self._searched += 1
        return found

    def _end(self, number: int) -> None:
        self._ended = number
        self._searched = 0


class Arrivals:
    """Puts what arrives into the buffer, and knows how good the newest search is."""

    def __init__(
        self, buffer: ReplayBuffer, *, pass_threshold: float | None, hopeless_after: int
    ) -> None:
        self._buffer = buffer
        self._pass_threshold = pass_threshold
        self._hopeless_after = hopeless_after
        self._excluded_in_a_row = 0
        self._passed = 0
        self._fresh = 0
        self.share = float("nan")
        """Share of correct ones among the newest arrivals that there were."""
        self.scored = 0
        """Trajectories that arrived with a reward, duplicates included."""
        self.excluded = 0
        """Trajectories that arrived without one."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Add one delivery to the buffer.

        Raises:
            AllExcludedError: Nothing could be scored for `hopeless_after` trajectories in a row.
        """
        result = self._buffer.add(batch)
        scored = result.kept + result.duplicate
        self.scored += scored
        self._fresh += scored
        rewards = batch.column("reward").to_numpy(zero_copy_only=False)
        if self._pass_threshold is not None:  # NaN compares false
            self._passed += int(np.count_nonzero(rewards >= self._pass_threshold))
        if result.excluded and not self.excluded:
            log.warning(
                "a response could not be scored and is left out: %s", _newest_failure(batch)
            )
        self.excluded += result.excluded
        self._excluded_in_a_row = 0 if scored else self._excluded_in_a_row + result.excluded
        if self._excluded_in_a_row >= self._hopeless_after:
            raise AllExcludedError(
                f"the last {self._excluded_in_a_row} responses could not be scored, so there is "
                f"nothing to learn from (the newest: {_newest_failure(batch)}): look at the reward "
                "function"
            )

    def metrics(self) -> dict[str, float]:
        """Return what the newest arrivals (since the last call) were worth, as scalars by name."""
        known = {"excluded": float(self.excluded)}
        if self._pass_threshold is None:
            return known
        if self._fresh:
            self.share = self._passed / self._fresh
            self._passed = self._fresh = 0
        return {"pass_at_1": self.share, **known}


def _newest_failure(batch: pa.RecordBatch) -> str:
    """Say what happened to the last response of a batch that could not be scored."""
    failed = [i for i, o in enumerate(batch.column("outcome").to_pylist()) if o != Outcome.OK]
    words = (batch.column(name)[failed[-1]].as_py() for name in ("outcome", "detail"))
    return ": ".join(word for word in words if word)


class Intake:
    """The only place where the trainer takes in trajectories, and where it waits for them."""

    def __init__(
        self,
        runtime: "Runtime",
        arrivals: Arrivals,
        *,
        timeout_s: float,
        interrupted: Callable[[], bool],
    ) -> None:
        self.runtime = runtime
        self.arrivals = arrivals
        self.interrupted = interrupted
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        """Seconds waited so far."""

    def take(self, timeout_s: float = 0.0) -> bool:
        """Add to the buffer what has arrived; returns whether anything has."""
        batches = self.runtime.receive(timeout_s)
        for batch in batches:
            self.arrivals.add(batch)
        return bool(batches)

    def wait(
        self,
        until: Callable[[], bool],
        *,
        what: str,
        number: int = NO_ROUND,
        arrivals_help: bool = True,
    ) -> bool:
        """Take in trajectories until a condition holds; the seconds count as waiting.

        Args:
            until: The condition.
            what: What is waited for, in words.
            number: The round that is waited for, if it is one.
            arrivals_help: Whether each arrival is progress, so that the timeout begins anew.

        Returns:
            Whether the condition holds; False only when the run was interrupted.

        Raises:
            WaitTimeoutError: It did not hold in time; the message names who was waited for.
        """
        start = progress = time.perf_counter()
        restarts = self.runtime.status().restarts
        try:
            while not until():
                if self.interrupted():
                    return False
                if time.perf_counter() - progress > PATIENCE * self._timeout_s:
                    raise self._in_vain(what, number)
                helped = self.take(POLL_S) and arrivals_help
                if helped or self.runtime.status().restarts > restarts:
                    progress = time.perf_counter()
                    restarts = self.runtime.status().restarts
            if number != NO_ROUND:
                self.take()  # the round's last trajectories
            return True
        finally:
            self.waited_s += time.perf_counter() - start

    def _in_vain(self, what: str, number: int) -> WaitTimeoutError:
        names = "; ".join(self.runtime.waiting_for(number)) or "nobody in particular"
        return WaitTimeoutError(
            f"waited {PATIENCE * self._timeout_s:g} s for {what}, in vain; waiting for: {names}. "
            "Look into that searcher's log, or raise sync.timeout_s"
        )


class Pace:
    """The trainer's side of the turn-taking."""

    def __init__(self, mode: Mode, intake: Intake) -> None:
        self._mode = mode
        self._runtime = intake.runtime
        self._intake = intake
        self._round = NO_ROUND

    def fill(self, filled: Callable[[], bool]) -> bool:
        """Wait for the initial samples; returns whether they came (False: interrupted)."""
        if self._mode == "free":
            return self._intake.wait(filled, what="the initial samples")
        while not filled():
            self._open()
            self._runtime.close_round(self._round)
            if not self._wait_for_round("the initial samples"):
                return False
        if self._mode == "barrier":
            self._open()
        return True

    def before_step(self, *, round_starts: bool) -> bool:
        """Take in what this mode allows; returns False when interrupted."""
        if self._mode == "lockstep" and round_starts:
            self._open()
            return self._wait_for_round("the searchers of this round")
        self._intake.take()
        return True

    def wait_for_samples(self, drawn: Callable[[], bool], what: str) -> bool:
        """Wait until a batch can be drawn; returns whether it was (False: interrupted).

        Where searchers search by rounds, a round of its own brings new samples.

        Raises:
            WaitTimeoutError: Nothing could be drawn in time, or within `MAX_EXTRA_ROUNDS`.
        """
        if self._mode == "free":
            return self._intake.wait(drawn, what=what, arrivals_help=False)
        for _ in range(MAX_EXTRA_ROUNDS):
            if self._mode == "lockstep":
                self._open()
            self._runtime.close_round(self._round)
            if not self._wait_for_round(what):
                return False
            if self._mode == "barrier":
                self._open()
            if drawn():
                return True
        raise WaitTimeoutError(
            f"{MAX_EXTRA_ROUNDS} rounds of search brought no {what}: raise one of the two"
        )

    def sync(self, publish: Callable[[], None]) -> bool:
        """Publish the weights as this mode demands; returns False when interrupted."""
        if self._mode != "barrier":
            publish()
            return True
        self._runtime.close_round(self._round)
        arrived = self._wait_for_round("the searchers at the barrier")
        publish()
        self._open()
        return arrived

    def _open(self) -> None:
        self._round += 1
        self._runtime.open_round(self._round)

    def _wait_for_round(self, what: str) -> bool:
        number = self._round
        return self._intake.wait(
            lambda: not self._runtime.waiting_for(number), what=what, number=number
        )
