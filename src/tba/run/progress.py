"""What a user sees while a run goes: a live panel in a terminal, otherwise a line now and then."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tba.records import EvalReport, StepReport

CELLS = {
    "reward": "{reward_mean:.3f}",
    "pass@1": "{pass_at_1:.3f}",
    "KL": "{kl:.4f}",
    "loss": "{loss:.4f}",
    "pair accuracy": "{pair_accuracy:.3f}",
    "beta": "{beta:.4g}",
    "learning rate": "{learning_rate:.3g}",
    "gradient norm": "{grad_norm:.3f}",
    "staleness": "{staleness_min:.0f}/{staleness_mean:.1f}/{staleness_max:.0f}",
    "search tokens/s": "{search_tokens_per_s:,.0f}",
    "train tokens/s": "{train_tokens_per_s:,.0f}",
    "trainer idle": "{trainer_idle_share:.1%}",
    "excluded": "{excluded:.0f}",
    "searcher idle": "{searcher_idle_share:.1%}",
    "buffer": "{buffer_size:,.0f}",
}
"""What is shown of a step, in this order; a cell whose metrics are missing is left out."""

CELLS_OF_SEARCH = ("pass@1", "staleness", "search tokens/s", "excluded", "searcher idle")
"""What says nothing where nobody searches."""
CELLS_A_ROW = 3
"""As many as fit into 80 columns."""
LIVE_INTERVAL_S = 0.5
"""Seconds between two pictures of the live panel."""
PLAIN_INTERVAL_S = 10.0
"""Seconds between two plain lines."""


class Progress:
    """Consumes the reports of a run; a context manager that gives the terminal back on leaving."""

    def __init__(
        self,
        steps: int,
        *,
        searches: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._hidden = () if searches else CELLS_OF_SEARCH
        self._console = Console(stderr=True) if console is None else console
        self._clock = clock
        # Drawn from `update` alone: a thread of its own would take time from the trainer's.
        self._live = (
            Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        )
        self._interval_s = PLAIN_INTERVAL_S if self._live is None else LIVE_INTERVAL_S
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._latest: StepReport | None = None
        self._evaluation: EvalReport | None = None
        self._shown_step = -1
        self._shown_at = float("-inf")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._latest is not None and self._latest.step != self._shown_step:
            self._show(self._latest)
        if self._live is not None:
            self._live.stop()

    def update(self, report: StepReport) -> None:
        """Take in a step; draw it if the last picture is old enough."""
        now = self._clock()
        if self._first is None:
            self._first = (report.step, now)
        self._latest = report
        if now - self._shown_at >= self._interval_s or report.step >= self._steps:
            self._show(report)

    def evaluated(self, report: EvalReport) -> None:
        """Take in and tell the accuracy on held-out queries."""
        self._evaluation = report
        excluded = f", {report.excluded} excluded" if report.excluded else ""
        told = [f"{name} {value:.3f}" for name, value in report.measured.items()]
        if report.greedy_pass_at_1 is not None:
            told.insert(0, f"{report.greedy_pass_at_1:.3f} greedy")
            told.insert(0, f"pass@1 {report.sampled_pass_at_1:.3f} sampled")
        self.event(
            f"evaluation at step {report.policy_version}: {', '.join(told)}, "
            f"{report.queries:,} queries{excluded}, {report.seconds:.0f} s"
        )

    def event(self, text: str) -> None:
        """Tell something at once: a warning, a searcher replaced, a checkpoint."""
        self._console.print(Text(text), soft_wrap=True)

    def _show(self, report: StepReport) -> None:
        cells = dict(self._cells(report))
        if self._live is None:
            self.event("  ".join(f"{label} {text}" for label, text in cells.items()))
        else:
            self._live.update(_panel(cells), refresh=True)
        self._shown_step, self._shown_at = report.step, self._clock()

    def _cells(self, report: StepReport) -> Iterator[tuple[str, str]]:
        """Yield label and text of everything known about the run now."""
        yield "step", f"{report.step:,}/{self._steps:,}"
        for label, template in CELLS.items():
            if label in self._hidden:
                continue
            try:
                yield label, template.format_map(report.metrics)
            except KeyError:  # this run does not have that metric
                continue
        if self._evaluation is not None:
            yield "evaluation", f"{_headline(self._evaluation):.3f}"
        left_s = self._seconds_left(report.step)
        if left_s is not None:
            yield "left", str(timedelta(seconds=round(left_s)))

    def _seconds_left(self, step: int) -> float | None:
        """Estimate the time to the last step from the pace since the first report."""
        if self._first is None or not self._first[0] < step < self._steps:
            return None
        first_step, first_at = self._first
        return (self._steps - step) * (self._clock() - first_at) / (step - first_step)


def _headline(report: EvalReport) -> float:
    """Return the one number of an evaluation: accuracy, where the task knows it, reward or loss."""
    accuracy = report.sampled_pass_at_1
    return next(iter(report.measured.values())) if accuracy is None else accuracy


def _panel(cells: dict[str, str]) -> Table:
    """Lay the cells out in rows."""
    grid = Table.grid(padding=(0, 3))
    texts = [Text.assemble((label, "dim"), " ", text) for label, text in cells.items()]
    for start in range(0, len(texts), CELLS_A_ROW):
        grid.add_row(*texts[start : start + CELLS_A_ROW])
    return grid
