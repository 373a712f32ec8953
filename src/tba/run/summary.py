"""`summary.json`: what a run came to. Free of torch.

`Totals` are what a run adds up while it goes; they travel in its checkpoints, so a resumed run's
summary covers all of it. They form a sum: `totals += Totals(...)`, with `Totals()` as zero.
"""

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter
from rich.table import Table

from tba.records import EvalReport, Int64
from tba.run.durable import replace_file, storage_errors


class Ending(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    """All steps were done."""
    INTERRUPTED = "interrupted"
    """Someone stopped it; it can be resumed."""
    FAILED = "failed"
    """It could not go on."""


@dataclass(frozen=True, slots=True)
class StalenessTotals:
    """What is needed for the least, mean and greatest staleness of all samples trained on."""

    count: int = 0
    """Samples."""
    total: int = 0
    """Sum of their staleness, in versions."""
    min: int = 0
    """Least staleness; means nothing while `count` is 0."""
    max: int = 0
    """Greatest staleness; means nothing while `count` is 0."""

    @classmethod
    def of(cls, staleness: Int64) -> Self:
        """Return the totals of one batch."""
        if not staleness.size:
            return cls()
        return cls(staleness.size, int(staleness.sum()), int(staleness.min()), int(staleness.max()))

    def __add__(self, other: "StalenessTotals") -> "StalenessTotals":
        if not self.count or not other.count:
            return self if self.count else other
        return StalenessTotals(
            self.count + other.count,
            self.total + other.total,
            min(self.min, other.min),
            max(self.max, other.max),
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """What a run adds up, over all its sessions."""

    seconds: float = 0.0
    """Wall-clock time of the run, without the time between a stop and its resumption."""
    trainer_seconds: float = 0.0
    """Wall-clock time of the trainer since the initial fill."""
    trainer_idle_seconds: float = 0.0
    """Of which it waited."""
    searcher_seconds: float = 0.0
    """Wall-clock time of all searchers together."""
    searcher_idle_seconds: float = 0.0
    """Of which they waited."""
    tokens_searched: int = 0
    """Response tokens generated."""
    tokens_trained: int = 0
    """Response tokens of the distinct trajectories of each batch, summed over steps."""
    kept: int = 0
    """Trajectories that entered the buffer as new ones."""
    duplicate: int = 0
    """Trajectories merged with an equal one in the buffer."""
    excluded: int = 0
    """Trajectories without a reward: scoring failed or did not apply."""
    bad_steps: int = 0
    """Trainer steps skipped for want of a finite loss and gradient."""
    searcher_restarts: int = 0
    """Searchers replaced."""
    staleness: StalenessTotals = StalenessTotals()
    """Over all samples trained on."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )


@dataclass(frozen=True, slots=True)
class StalenessRange:
    """Staleness of the samples trained on, in versions."""

    min: int
    """Least."""
    mean: float
    """Mean over samples."""
    max: int
    """Greatest."""


@dataclass(frozen=True, slots=True)
class TrajectoryCounts:
    """What became of the trajectories found."""

    kept: int
    """Entered the buffer as new ones."""
    duplicate: int
    """Merged with an equal one, or left out for a near one."""
    excluded: int
    """Without a reward."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What `summary.json` holds."""

    ended: Ending
    """How the run ended."""
    detail: str
    """For an interrupted or failed run, why, and for one that was not evaluated; in one
    sentence."""
    steps: int
    """Optimiser steps done."""
    seconds: float
    """Wall-clock time of the run."""
    before: EvalReport | None
    """Accuracy of the initial policy; None if the run ended before it was known, or where
    there is nothing to measure by."""
    after: EvalReport | None
    """Accuracy of the final policy; None if the run ended early, or likewise."""
    tokens_searched: int
    """Response tokens generated."""
    tokens_trained: int
    """Response tokens of the distinct trajectories of each batch, summed over steps."""
    trainer_idle_share: float
    """Share of its time since the initial fill that the trainer waited."""
    searcher_idle_share: float
    """Share of their time that the searchers waited."""
    staleness: StalenessRange | None
    """Trainer's version minus the sample's; None if nothing was trained on."""
    trajectories: TrajectoryCounts
    """What became of the trajectories found."""
    bad_steps: int
    """Trainer steps skipped for want of a finite loss and gradient."""
    searcher_restarts: int
    """Searchers replaced."""

    def write(self, path: Path) -> None:
        """Write the summary in one atomic step.

        Raises:
            StorageError: the disk refused it; an older summary is intact.
        """
        text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)
        with storage_errors(f"summary {path}"):
            replace_file(path, [text.encode()])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a summary back."""
        return TypeAdapter(cls).validate_json(path.read_bytes())


def summarize(
    totals: Totals,
    *,
    steps: int,
    before: EvalReport | None,
    after: EvalReport | None,
    ended: Ending,
    detail: str = "",
) -> Summary:
    """Turn a run's totals into its summary."""
    seen = totals.staleness
    return Summary(
        ended=ended,
        detail=detail,
        steps=steps,
        seconds=totals.seconds,
        before=before,
        after=after,
        tokens_searched=totals.tokens_searched,
        tokens_trained=totals.tokens_trained,
        trainer_idle_share=_share(totals.trainer_idle_seconds, totals.trainer_seconds),
        searcher_idle_share=_share(totals.searcher_idle_seconds, totals.searcher_seconds),
        staleness=StalenessRange(seen.min, seen.total / seen.count, seen.max)
        if seen.count
        else None,
        trajectories=TrajectoryCounts(totals.kept, totals.duplicate, totals.excluded),
        bad_steps=totals.bad_steps,
        searcher_restarts=totals.searcher_restarts,
    )


def results_table(before: EvalReport, after: EvalReport) -> Table:
    """Render accuracy before and after the run, side by side."""
    table = Table(title=f"{after.queries} held-out queries, {after.policy_version} steps")
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, field in (
        ("sampled pass@1", "sampled_pass_at_1"),
        ("greedy pass@1", "greedy_pass_at_1"),
    ):
        if getattr(after, field) is not None:
            old, new = 100 * getattr(before, field), 100 * getattr(after, field)
            table.add_row(name, f"{old:.1f} %", f"{new:.1f} %", f"{new - old:+.1f}")
    for name, new in after.measured.items():
        old = before.measured.get(name)  # None: it could not be told then, as of empty answers
        told = ("", "") if old is None else (f"{old:.3f}", f"{new - old:+.3f}")
        table.add_row(name.replace("_", " "), told[0], f"{new:.3f}", told[1])
    if before.mean_response_tokens is not None and after.mean_response_tokens is not None:
        old, new = before.mean_response_tokens, after.mean_response_tokens
        table.add_row("response tokens", f"{old:.1f}", f"{new:.1f}", f"{new - old:+.1f}")
        table.add_row("excluded", str(before.excluded), str(after.excluded), "")
    return table


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
