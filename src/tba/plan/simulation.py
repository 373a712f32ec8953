"""A run in simulated time: the boxes of `tba.trainer`, `tba.searcher` and `tba.pace`, costs apart.

    searcher:  wait for its turn --> pull weights --> search --> deliver --+
    intake:    log what arrived, make it durable, hand it on              <+
    trainer:   T0 take in --> T1 draw --> T2 step --> T3 publish (a thread hashes)

Whoever works here shares its processors with whoever else works there, and the trainer's threads
share one interpreter. On machines of their own searchers share nothing but the trainer's network.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np

from tba.config import Config
from tba.pace import NO_ROUND, Lane, searches_per_round
from tba.plan.clockwork import Kind, Process, Processors, Signal, Timers, play, run_process
from tba.plan.profile import Profile, lognormal
from tba.plan.simulated_buffer import Catalogue, Drawn, Found, SimulatedBuffer
from tba.records import Trajectory
from tba.sync import NOTHING_PUBLISHED

INBOX_DELIVERIES = 64
"""What the intake thread takes at a time, as in the local runtime."""
DROWNED = 10
"""Adding what arrived during a step may take so many times as long as the step's own work. Beyond
that the simulation ends: steps may grow without bound, and nobody needs so many searchers."""
OWN_DELIVERIES = 2
"""A searcher goes on while this many of its own wait besides: one read, one in its pipe."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is asked of a simulation, beside the run's settings."""

    searchers: int
    """N."""
    ranks: int = 1
    """M: trainer ranks, each on a machine like this one."""
    apart: bool = False
    """Whether each searcher has a machine like this one to itself."""
    bytes_per_s: float = 10e9
    """Speed of the network, for weights to searchers apart and for gradients between ranks."""
    lengths: tuple[float, float] | None = None
    """Mean and standard deviation of lognormal response lengths; None: those of the profile."""
    warm_up: int = 100
    """Steps before anything is counted."""
    steps: int = 300
    """Steps that are counted."""


@dataclass(slots=True)
class Tally:
    """What is counted."""

    began_s: float = 0.0
    """When counting began."""
    seconds: float = 0.0
    """Simulated seconds counted."""
    steps: int = 0
    """Trainer steps."""
    waited_s: float = 0.0
    """Seconds that the trainer waited for searchers."""
    idle_s: float = 0.0
    """Seconds that searchers waited for the trainer, over all searchers."""
    trajectories: int = 0
    """Trajectories that reached the buffer."""
    tokens_searched: int = 0
    """Response tokens in them."""
    tokens_trained: int = 0
    """Response tokens of the distinct trajectories of each batch."""
    drawn: int = 0
    """Samples drawn."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Samples trained on by staleness."""
    recent_staleness: Counter[int] = field(default_factory=Counter)
    """Of which the m branch drew."""


def communication_s(profile: Profile, setup: Setup) -> float:
    """Return what a ring all-reduce of the gradient adds to a step."""
    return 2 * (setup.ranks - 1) / setup.ranks * profile.gradient_bytes / setup.bytes_per_s


def simulate(profile: Profile, config: Config, setup: Setup) -> Tally:
    """Run a simulation; the same arguments give the same result.

    Args:
        profile: The costs.
        config: The run's settings; its number of searchers and steps are `setup`'s.
        setup: What is asked.
    """
    return _Run(profile, config, setup).run()


class _Seat:
    """A searcher in simulated time; its `search` finds at once what it then has to work for."""

    def __init__(self, number: int, run: "_Run") -> None:
        self.number = number
        self._run = run
        self.held = NOTHING_PUBLISHED  # version of its weights
        self.to_pull = False
        self.to_search_s = 0.0
        self.undelivered = 0
        self.delivered = NO_ROUND  # newest round that the trainer has in full
        self.idle_since: float | None = None

    def search(self, ticket: int) -> list[Trajectory]:
        """Return the search batch of a ticket, found with the newest weights published."""
        self.to_pull = self._run.published > self.held
        self.held = self._run.published
        found = self._run.find(ticket, self.held)
        longest, tokens = int(found.lengths.max()), int(found.lengths.sum())
        self.to_search_s = self._run.profile.search.seconds(tokens, longest)
        return cast(list[Trajectory], [found])  # a lane only passes on what it is given


@dataclass(frozen=True, slots=True)
class _Delivery:
    seat: _Seat
    found: list[Found]
    ended: int

    @property
    def trajectories(self) -> int:
        return sum(found.lengths.size for found in self.found)


class _Run:
    """One simulation."""

    def __init__(self, profile: Profile, config: Config, setup: Setup) -> None:
        self.profile, self._setup = profile, setup
        search = config.search.model_copy(update={"searchers": setup.searchers})
        self._config = config.model_copy(update={"search": search})
        self._mode = config.sync.mode
        self._timers = Timers()
        slowdown = (profile.trainer_slowdown, 1.0, profile.searcher_slowdown)
        self._here = Processors(profile.places, (1.0, 1.0, 1.0) if setup.apart else slowdown)
        self._network = Processors(1.0)
        draws, finds, given = np.random.default_rng(config.seed).spawn(3)
        lengths = partial(lognormal, *setup.lengths, generator=given) if setup.lengths else None
        samples = config.search.samples_per_query
        self._catalogue = Catalogue(profile.responses, samples, lengths, finds)
        self._buffer = SimulatedBuffer(
            profile.queries, self._catalogue.most_common, config.buffer, draws
        )
        self._seats = [_Seat(number, self) for number in range(setup.searchers)]
        self._opened = self._closing = NO_ROUND
        self._round_changed, self._arrival, self._taken = Signal(), Signal(), Signal()
        self._asked, self._hashed = Signal(), Signal()
        self._is_hashing = False
        self.published = 0
        """Version that searchers can take."""
        self._inbox: list[_Delivery] = []
        self._arrived: list[_Delivery] = []
        self._scored = 0
        self._version = 0
        self._tally = Tally()
        self._is_done = False

    def run(self) -> Tally:
        """Play it to the end of the last step."""
        run_process(self._intake())
        for seat in self._seats:
            run_process(self._searcher(seat))
        run_process(self._trainer())
        play(self._timers, [self._here, self._network], until=lambda: self._is_done)
        for seat in self._seats:
            self._book_idle(seat)
        self._tally.seconds = self._timers.now_s - self._tally.began_s
        return self._tally

    def find(self, ticket: int, version: int) -> Found:
        """Return the responses to the queries of a ticket."""
        first = ticket * self._config.search.queries_per_batch
        positions = np.arange(first, first + self._config.search.queries_per_batch)
        return self._catalogue.find(np.unique(positions % self.profile.queries), version)

    # --- the searchers

    def _searcher(self, seat: _Seat) -> Process:
        lane = Lane(
            seat,
            self._mode,
            searches_per_round=searches_per_round(self._config),
            first_ticket=seat.number,
            stride=self._setup.searchers,
        )
        while True:
            found = lane.turn(self._opened, self._closing)
            if found is None:
                yield from self._idle(seat, self._round_changed)
                continue
            yield from self._work(seat)
            if found:
                delivery = _Delivery(seat, cast(list[Found], found), lane.ended)
                yield from self._deliver(delivery)

    def _work(self, seat: _Seat) -> Process:
        """Take weights, if there are newer ones, and search, if there was something to search."""
        seconds, seat.to_search_s = seat.to_search_s, 0.0
        if seat.to_pull:
            seat.to_pull = False
            seconds += self.profile.pull_s
            if self._setup.apart:
                transfer_s = self.profile.weight_bytes / self._setup.bytes_per_s
                yield self._network.work(Kind.SEARCHER, transfer_s)
        if seconds and self._setup.apart:
            yield self._timers.sleep(seconds)
        elif seconds:
            yield self._here.work(Kind.SEARCHER, seconds)

    def _deliver(self, delivery: _Delivery) -> Process:
        seat = delivery.seat
        while len(self._inbox) >= INBOX_DELIVERIES and seat.undelivered >= OWN_DELIVERIES:
            yield from self._idle(seat, self._taken)
        seat.undelivered += 1
        self._inbox.append(delivery)
        self._asked.fire()

    def _idle(self, seat: _Seat, signal: Signal) -> Process:
        seat.idle_since = self._timers.now_s
        yield signal
        self._book_idle(seat)
        seat.idle_since = None

    def _book_idle(self, seat: _Seat) -> None:
        if seat.idle_since is not None:
            since = max(seat.idle_since, self._tally.began_s)
            self._tally.idle_s += self._timers.now_s - since

    # --- the intake thread of the trainer's process

    def _intake(self) -> Process:
        while True:
            if not self._inbox:
                yield self._asked
                continue
            taken = self._inbox[:INBOX_DELIVERIES]
            del self._inbox[:INBOX_DELIVERIES]
            count = sum(delivery.trajectories for delivery in taken)
            yield self._here.work(Kind.INTERPRETER, self.profile.store_s * count)
            yield self._timers.sleep(self.profile.store_wait_s)
            for delivery in taken:
                delivery.seat.undelivered -= 1
                delivery.seat.delivered = delivery.ended
            self._arrived += taken
            self._tally.trajectories += count
            self._tally.tokens_searched += sum(
                int(found.lengths.sum()) for delivery in taken for found in delivery.found
            )
            self._taken.fire()
            self._arrival.fire()

    # --- the trainer

    def _trainer(self) -> Process:
        yield from self._fill()
        while self._version < self._setup.warm_up + self._setup.steps:
            if self._version == self._setup.warm_up:
                self._tally = Tally(began_s=self._timers.now_s)
            if self._mode == "lockstep" and self._at_sync():  # T0
                self._open()
                yield from self._wait_for_round()
            else:
                yield from self._take()
            batch = self._draw()  # T1
            while batch is None:
                yield from self._wait_for_samples()
                batch = self._draw()
            yield from self._step(batch)  # T2
            if self._is_done:
                return
            if self._at_sync():  # T3
                yield from self._sync()
        self._is_done = True

    def _step(self, batch: Drawn) -> Process:
        ranks = self._setup.ranks
        step_s = self.profile.step.seconds(batch.tokens / ranks)
        yield self._here.work(Kind.INTERPRETER, step_s)
        if ranks > 1:
            yield self._timers.sleep(communication_s(self.profile, self._setup))
        self._count(batch)
        waiting = sum(delivery.trajectories for delivery in self._arrived)
        add_s = self.profile.add_s * waiting
        self._is_done = self._mode == "free" and add_s > DROWNED * step_s

    def _at_sync(self) -> bool:
        return self._version % self._config.sync.sync_every == 0

    def _draw(self) -> Drawn | None:
        trainer = self._config.trainer
        return self._buffer.draw(
            trainer.queries_per_batch, trainer.samples_per_query, self._version
        )

    def _count(self, batch: Drawn) -> None:
        tally, staleness = self._tally, np.maximum(self._version - batch.versions, 0)
        self._version += 1
        tally.steps += 1
        tally.drawn += staleness.size
        tally.tokens_trained += batch.tokens
        for counter, some in (
            (tally.staleness, staleness),
            (tally.recent_staleness, staleness[batch.recent]),
        ):
            values, counts = np.unique(some, return_counts=True)
            counter.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def _take(self) -> Process:
        """Put what has arrived into the buffer."""
        arrived, self._arrived = self._arrived, []
        count = sum(delivery.trajectories for delivery in arrived)
        if count:
            yield self._here.work(Kind.INTERPRETER, self.profile.add_s * count)
        for delivery in arrived:
            for found in delivery.found:
                self._buffer.add(found)
        self._scored += count

    def _wait(self, until: Callable[[], bool]) -> Process:
        start = self._timers.now_s
        while not until():
            if not self._arrived:
                yield self._arrival
            yield from self._take()
        self._tally.waited_s += self._timers.now_s - start

    def _wait_for_round(self) -> Process:
        yield from self._wait(lambda: all(s.delivered >= self._opened for s in self._seats))
        yield from self._take()

    def _fill(self) -> Process:
        enough = self._config.buffer.initial_samples
        if self._mode != "lockstep":
            enough = max(enough, self._config.trainer.samples_per_query)
        if self._mode == "free":
            yield from self._wait(lambda: self._scored >= enough)
            return
        while self._scored < enough:
            self._open()
            yield from self._end_round()
        if self._mode == "barrier":
            self._open()

    def _wait_for_samples(self) -> Process:
        """Wait for new samples, since none may be drawn any more."""
        if self._mode == "free":
            scored = self._scored
            yield from self._wait(lambda: self._scored > scored)
            return
        if self._mode == "lockstep":
            self._open()
        yield from self._end_round()
        if self._mode == "barrier":
            self._open()

    def _sync(self) -> Process:
        if self._mode != "barrier":
            yield from self._publish()
            return
        yield from self._end_round()
        yield from self._publish()
        self._open()

    def _publish(self) -> Process:
        while self._is_hashing:
            yield self._hashed
        yield self._here.work(Kind.INTERPRETER, self.profile.publish_s)
        self._is_hashing = True
        run_process(self._hash(self._version))
        while self._mode != "free" and self._is_hashing:
            yield self._hashed

    def _hash(self, version: int) -> Process:
        yield self._here.work(Kind.NATIVE, self.profile.hash_s)
        self.published = version
        self._is_hashing = False
        self._hashed.fire()

    def _open(self) -> None:
        self._opened += 1
        self._round_changed.fire()

    def _end_round(self) -> Process:
        self._closing = self._opened
        self._round_changed.fire()
        yield from self._wait_for_round()
