"""What a run adds up: totals for summary and checkpoints, rates for the progress display."""

import time
from collections.abc import Mapping
from dataclasses import replace

from tba.buffer import ReplayBuffer
from tba.records import StepReport
from tba.run.summary import StalenessTotals, Totals
from tba.runtimes.base import SearchStatus


class Ledger:
    """Totals over all sittings of a run."""

    def __init__(self, before: Totals, buffer: ReplayBuffer, *, started: float) -> None:
        self._steps = before  # what steps add up; the rest is read when asked for
        self._earlier = before
        self._buffer = buffer
        self._started = started
        self._fill: tuple[float, int] | None = None  # when it was over, tokens searched by then

    def note(self, report: StepReport) -> None:
        """Add a trainer step."""
        metrics = report.metrics
        self._steps += Totals(
            trainer_seconds=metrics["step_s"],
            trainer_idle_seconds=metrics["wait_s"],
            tokens_trained=int(metrics["tokens_trained"]),
            bad_steps=int(metrics["skipped"]),
            staleness=StalenessTotals.of(report.staleness),
        )

    def totals(self, status: SearchStatus) -> Totals:
        """Return the totals up to now."""
        earlier = self._earlier
        return replace(
            self._steps,
            seconds=earlier.seconds + time.perf_counter() - self._started,
            searcher_seconds=earlier.searcher_seconds + status.busy_s + status.idle_s,
            searcher_idle_seconds=earlier.searcher_idle_seconds + status.idle_s,
            tokens_searched=earlier.tokens_searched + status.tokens,
            searcher_restarts=earlier.searcher_restarts + status.restarts,
            kept=self._buffer.kept,  # it was rebuilt from the whole log
            duplicate=self._buffer.duplicate,
            excluded=self._buffer.excluded,
        )

    def rates(self, status: SearchStatus) -> Mapping[str, float]:
        """Return idle shares and the speed of search since the first step of this sitting."""
        trainer_s = self._steps.trainer_seconds - self._earlier.trainer_seconds
        idle_s = self._steps.trainer_idle_seconds - self._earlier.trainer_idle_seconds
        searcher_s = status.busy_s + status.idle_s
        if self._fill is None:
            self._fill = (time.perf_counter(), status.tokens)
        filled_at, tokens = self._fill
        since = time.perf_counter() - filled_at
        return {
            "trainer_idle_share": idle_s / trainer_s if trainer_s else 0.0,
            "searcher_idle_share": status.idle_s / searcher_s if searcher_s else 0.0,
            "search_tokens_per_s": (status.tokens - tokens) / since if since > 1 else 0.0,
            "searchers_alive": float(status.alive),
        }
