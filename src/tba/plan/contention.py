"""What a trainer and a searcher's process, both busy, do to each other on this machine."""

import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

from tba.errors import WaitTimeoutError
from tba.pace import longest_search_s
from tba.plan.timing import WINDOW_S, Sides, kept_waiting_s, repeated
from tba.run.rollouts import RolloutLog
from tba.runtimes.lanes import SearchPlan
from tba.runtimes.local import LocalRuntime
from tba.runtimes.resources import searcher_devices, searcher_threads

TURNS = 4
"""Windows of each kind, by turns, so that a drift of the machine touches all alike."""
POLL_S = 0.01
SETTLED_S = 0.02
"""After a delivery, until its searcher has booked its time."""


def measure_contention(
    plan: SearchPlan, folder: Path, step: Callable[[], float]
) -> tuple[float, float]:
    """Return how many times longer a step and a search batch take while both are busy.

    Nothing crosses a wire meanwhile: in barrier mode a searcher delivers when it is asked to. That
    they take turns where there are fewer processors than threads is no part of it.

    Args:
        plan: What the searcher is told; one searcher, barrier mode.
        folder: Takes the searcher's log and rollouts.
        step: Does a trainer step and returns its seconds.
    """
    logs = folder / "logs"
    logs.mkdir()
    steps, searches = Sides(), Sides()
    with RolloutLog(folder / "contention.arrows") as log:
        runtime = LocalRuntime(
            plan,
            log,
            devices=searcher_devices(plan.config),
            threads=searcher_threads(plan.config),
            log_folder=str(logs),
        )
        with runtime:
            searcher = _Beside(runtime, longest_search_s(plan.config))
            searcher.search(_sleep)  # it loads its models
            for _ in range(TURNS):
                steps.alone.append(_mean(list(repeated(step))))
                searches.alone.append(searcher.search(_sleep)[0])
                search_s, step_s = searcher.search(step)
                searches.beside.append(search_s)
                steps.beside.append(_mean(step_s[:-1] or step_s))  # the last was so for a part
    return steps.slowdown(), searches.slowdown()


class _Beside:
    """A searcher in a process of its own, which searches while something else is done here."""

    def __init__(self, runtime: LocalRuntime, timeout_s: float) -> None:
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._round = -1

    def search(self, meanwhile: Callable[[], float]) -> tuple[float, list[float]]:
        """Let it search for a window; return its seconds a batch, and what `meanwhile` returned."""
        self._round += 1
        before_s = self._searched_s()
        self._runtime.open_round(self._round)
        started = time.perf_counter()
        is_closed, returned = False, []
        while self._runtime.waiting_for(self._round):
            returned.append(meanwhile())
            waited_s = time.perf_counter() - started
            if waited_s > WINDOW_S and not is_closed:
                self._runtime.close_round(self._round)
                is_closed = True
            if waited_s > self._timeout_s:
                raise WaitTimeoutError(
                    f"a searcher delivered nothing within {self._timeout_s:g} s: look whether it "
                    "can load its model, or raise sync.timeout_s"
                )
        time.sleep(SETTLED_S)
        batches = self._runtime.receive(0.0)
        tickets = {ticket for batch in batches for ticket in batch.column("ticket").to_pylist()}
        return (self._searched_s() - before_s) / max(len(tickets), 1), returned

    def _searched_s(self) -> float:
        """Return the seconds for which the searcher has searched, and was not kept from it."""
        (process,) = (p for p in active_children() if p.name.startswith("searcher-"))
        return self._runtime.status().busy_s - kept_waiting_s(str(process.pid))


def _sleep() -> float:
    time.sleep(POLL_S)
    return POLL_S


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)
