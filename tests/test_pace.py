"""Turn-taking: who searches when, what is delivered when, and what the trainer waits for."""

import time

import numpy as np
import pyarrow as pa
import pytest

from tba.buffer import ReplayBuffer
from tba.errors import AllExcludedError, WaitTimeoutError
from tba.pace import Arrivals, Intake, Lane, Pace
from tba.records import FinishReason, Outcome, Score, Trajectory
from tba.run.rollouts import encode
from tba.runtimes.base import SearchStatus


def trajectory(ticket: int, reward: float | None = 1.0, detail: str = "") -> Trajectory:
    score = (
        Score(Outcome.OK, reward)
        if reward is not None
        else Score(Outcome.ERROR, float("nan"), detail)
    )
    return Trajectory(
        query_id=0,
        prompt_ids=np.array([1], dtype=np.int32),
        tokens=np.array([2, ticket + 3], dtype=np.int32),
        text="",
        log_mu=np.zeros(2, dtype=np.float32),
        log_ref=np.zeros(2, dtype=np.float32),
        score=score,
        finish_reason=FinishReason.STOP,
        policy_version=0,
        reference_version=0,
        ticket=ticket,
        searcher=0,
        temperature=1.0,
    )


class CountingSearcher:
    def search(self, ticket: int) -> list[Trajectory]:
        return [trajectory(ticket)]


def tickets(found: list[Trajectory] | None) -> list[int] | None:
    return None if found is None else [t.ticket for t in found]


def lane(mode: str, searches: int = 2) -> Lane:
    return Lane(
        CountingSearcher(),
        mode,  # type: ignore[arg-type]
        searches_per_round=searches,
        first_ticket=1,
        stride=3,
    )


def test_free_lane_delivers_each_batch_at_once() -> None:
    free = lane("free")
    assert [tickets(free.turn(-1, -1)) for _ in range(3)] == [[1], [4], [7]]
    assert free.next_ticket == 10


def test_lockstep_lane_searches_its_share_of_an_open_round_and_stops() -> None:
    lockstep = lane("lockstep")
    assert lockstep.turn(-1, -1) is None  # no round is open
    assert tickets(lockstep.turn(0, -1)) == [1]
    assert lockstep.ended == -1
    assert tickets(lockstep.turn(0, -1)) == [4]
    assert lockstep.ended == 0
    assert lockstep.turn(0, -1) is None
    assert tickets(lockstep.turn(1, -1)) == [7]


def test_barrier_lane_keeps_what_it_finds_until_it_is_asked() -> None:
    barrier = lane("barrier")
    assert barrier.turn(-1, -1) is None
    assert tickets(barrier.turn(0, -1)) == []
    assert tickets(barrier.turn(0, -1)) == []
    assert tickets(barrier.turn(0, 0)) == [1, 4]  # without another search
    assert barrier.ended == 0
    assert barrier.turn(0, 0) is None
    assert tickets(barrier.turn(1, 1)) == [7]  # asked at once: one batch at least


def test_a_replaced_lane_does_not_search_a_round_that_was_delivered() -> None:
    for mode in ("barrier", "lockstep"):
        again = Lane(
            CountingSearcher(), mode, searches_per_round=1, first_ticket=1, stride=3, ended=4
        )
        assert again.turn(4, 4) is None
        assert tickets(again.turn(5, 5)) == [1]
        assert again.ended == 5


def test_a_lane_that_leaves_hands_out_what_it_keeps() -> None:
    barrier = lane("barrier")
    barrier.turn(0, -1)
    barrier.turn(0, -1)
    assert tickets(barrier.leave()) == [1, 4]
    assert barrier.leave() == []


class ScriptedRuntime:
    """Delivers one batch a call while a round is open, then says that the round has ended."""

    def __init__(self, batches_per_round: int = 2, reward: float | None = 1.0) -> None:
        self.batches_per_round = batches_per_round
        self.reward = reward
        self.events: list[str] = []
        self.ticket = 0
        self.left = 0
        self.restarts = 0

    def open_round(self, number: int) -> None:
        self.events.append(f"open {number}")
        self.left = self.batches_per_round

    def close_round(self, number: int) -> None:
        self.events.append(f"close {number}")

    def receive(self, timeout_s: float) -> list[pa.RecordBatch]:
        if self.left == 0:
            return []
        self.left -= 1
        self.ticket += 1
        self.events.append("batch")
        return [encode([trajectory(self.ticket, self.reward, "boom")])]

    def waiting_for(self, number: int) -> list[str]:
        return ["searcher 0, generating for 3.0 s"] if self.left else []

    def status(self) -> SearchStatus:
        return SearchStatus(tokens=0, busy_s=0.0, idle_s=0.0, alive=1, restarts=self.restarts)


def make_intake(
    runtime: ScriptedRuntime, *, timeout_s: float = 5.0, hopeless_after: int = 100
) -> tuple[Intake, ReplayBuffer]:
    buffer = ReplayBuffer(capacity_per_query=100)
    arrivals = Arrivals(buffer, pass_threshold=1.0, hopeless_after=hopeless_after)
    intake = Intake(runtime, arrivals, timeout_s=timeout_s, interrupted=lambda: False)  # type: ignore[arg-type]
    return intake, buffer


def test_lockstep_takes_in_the_whole_round_before_the_step() -> None:
    runtime = ScriptedRuntime()
    intake, buffer = make_intake(runtime)
    pace = Pace("lockstep", intake)
    assert pace.before_step(round_starts=True)
    assert runtime.events == ["open 0", "batch", "batch"]
    assert len(buffer) == 2
    assert pace.before_step(round_starts=False)  # the second of k steps opens nothing
    pace.sync(lambda: runtime.events.append("publish"))
    assert pace.before_step(round_starts=True)
    assert runtime.events[3:] == ["publish", "open 1", "batch", "batch"]


def test_barrier_publishes_between_the_delivery_of_one_round_and_the_opening_of_the_next() -> None:
    runtime = ScriptedRuntime()
    intake, buffer = make_intake(runtime)
    pace = Pace("barrier", intake)
    assert pace.fill(lambda: len(buffer) >= 3)  # two rounds of two
    assert runtime.events == [
        *("open 0", "close 0", "batch", "batch"),
        *("open 1", "close 1", "batch", "batch"),
        "open 2",
    ]
    runtime.events.clear()
    pace.sync(lambda: runtime.events.append("publish"))
    assert runtime.events == ["close 2", "batch", "batch", "publish", "open 3"]


def test_a_wait_that_runs_out_names_who_was_waited_for() -> None:
    runtime = ScriptedRuntime()
    runtime.open_round(0)
    runtime.receive = lambda timeout_s: []  # type: ignore[method-assign]
    intake, _ = make_intake(runtime, timeout_s=0.05)
    with pytest.raises(
        WaitTimeoutError, match=r"the initial samples, in vain; .*searcher 0, generating"
    ):
        intake.wait(lambda: False, what="the initial samples")
    assert intake.waited_s >= 0.1, "twice the time after which a silent searcher is replaced"


def test_a_searcher_that_was_replaced_is_waited_for_anew() -> None:
    runtime = ScriptedRuntime()
    intake, _ = make_intake(runtime, timeout_s=0.1)
    calls = []

    def receive(timeout_s: float) -> list[pa.RecordBatch]:
        time.sleep(0.05)
        calls.append(time.perf_counter())
        runtime.restarts = min(len(calls) // 3, 4)  # one death every 0.15 s, four in all
        return []

    runtime.receive = receive  # type: ignore[method-assign]
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s"):
        intake.wait(lambda: False, what="anything")
    assert calls[-1] - calls[0] > 0.5, "each replacement gave it time"


def test_an_interrupted_wait_ends_without_an_error() -> None:
    intake, _ = make_intake(ScriptedRuntime())
    intake.interrupted = lambda: True
    assert intake.wait(lambda: False, what="anything") is False


def test_a_run_in_which_nothing_can_be_scored_ends_and_says_why() -> None:
    runtime = ScriptedRuntime(batches_per_round=10, reward=None)
    runtime.open_round(0)
    intake, _ = make_intake(runtime, hopeless_after=4)
    with pytest.raises(AllExcludedError, match=r"the last 4 responses could not be scored.*boom"):
        intake.wait(lambda: False, what="the initial samples")


def test_pass_at_1_counts_what_arrived_since_the_last_call_and_leaves_failures_out() -> None:
    buffer = ReplayBuffer(capacity_per_query=10)
    arrivals = Arrivals(buffer, pass_threshold=1.0, hopeless_after=100)
    arrivals.add(
        encode([trajectory(1, 1.0), trajectory(2, 0.0), trajectory(3, None), trajectory(4, 0.5)])
    )
    assert arrivals.metrics()["pass_at_1"] == pytest.approx(1 / 3)
    assert arrivals.metrics()["pass_at_1"] == pytest.approx(1 / 3)  # nothing new since
    arrivals.add(encode([trajectory(5, 1.0)]))
    assert arrivals.metrics()["pass_at_1"] == 1.0


def test_where_nothing_is_right_or_wrong_no_pass_at_1_is_told() -> None:
    arrivals = Arrivals(ReplayBuffer(8), pass_threshold=None, hopeless_after=100)
    arrivals.add(encode([trajectory(i, 1.0) for i in range(3)]))
    assert arrivals.metrics() == {"excluded": 0.0}
