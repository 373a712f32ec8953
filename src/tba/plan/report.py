"""Plans as tables for a terminal, and as a picture."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from tba.plan.planning import FRESHER, MAY_WAIT, NEARLY, Plan, Point
from tba.plan.profile import Profile

COLUMNS = {
    "searchers": ("searchers", ""),
    "steps/s": ("steps_per_s", ".2f"),
    "trainer idle": ("trainer_idle_share", ".1%"),
    "searchers idle": ("searcher_idle_share", ".1%"),
    "searched/s": ("searched_per_s", ",.0f"),
    "drawn/s": ("drawn_per_s", ",.0f"),
    "reuse": ("reuse", ".2f"),
    "staleness mean": ("staleness_mean", ".1f"),
    "m branch": ("staleness_recent", ".1f"),
    "median": ("staleness_median", ""),
    "95 %": ("staleness_p95", ""),
}
"""Titles, with the field of a point and its format."""


def cells(point: Point) -> list[str]:
    """Return a point's row."""
    values = [(getattr(point, field), form) for field, form in COLUMNS.values()]
    row = ["-" if value is None else format(value, form) for value, form in values]
    return [f"{row[0]} *", *row[1:]] if point.is_drowned else row


def costs_table(profile: Profile) -> Table:
    """Render what was measured."""
    table = Table("cost", "", box=None, pad_edge=False, title="measured", title_justify="left")
    table.columns[1].justify = "right"
    for name, seconds in costs(profile):
        table.add_row(name, seconds)
    return table


def costs(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield what was measured, in words."""
    for stage, seconds in profile.stages_s.items():
        yield f"a search batch: {stage}", f"{1e3 * seconds:.2f} ms"
    step = profile.step
    yield "a step, whatever its tokens", f"{1e3 * step.fixed_s:.2f} ms"
    yield "a step, for 1,000 response tokens", f"{1e6 * step.per_token_s:.2f} ms"
    yield "publishing: the trainer copies", f"{1e3 * profile.publish_s:.2f} ms"
    yield "publishing: a thread hashes", f"{1e3 * profile.hash_s:.2f} ms"
    yield "logging 1,000 trajectories", f"{1e6 * profile.store_s:.2f} ms"
    yield "the disk makes a delivery durable", f"{1e3 * profile.store_wait_s:.2f} ms"
    yield "adding 1,000 trajectories to the buffer", f"{1e6 * profile.add_s:.2f} ms"
    yield "a step beside a busy searcher", f"{profile.trainer_slowdown:.2f} times as long"
    yield "a search batch beside a busy trainer", f"{profile.searcher_slowdown:.2f} times as long"


def plan_table(plan: Plan) -> Table:
    """Render the curve."""
    where = "on machines of their own" if plan.setup.apart else "on this machine"
    table = Table(title=f"simulated, searchers {where}", box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for point in plan.points:
        table.add_row(*cells(point))
    return table


def answers(plan: Plan) -> Iterator[str]:
    """Yield what the curve says, a sentence a line."""
    if any(point.is_drowned for point in plan.points):
        yield (
            "* more arrives than the trainer's process can take in: its steps grow longer and "
            "longer, and the figures are those of the first ones"
        )
    draws = f"draws no more samples than are searched and waits at most {MAY_WAIT:.0%} of its time"
    yield _answer(plan.enough, f"the trainer {draws}")
    if any(point.staleness_recent is not None for point in plan.points):
        yield _answer(
            plan.freshest,
            f"the m branch is as fresh as it gets here (within {FRESHER:.0%} of its staleness)",
        )
    yield _answer(plan.quickest, f"steps come as fast as they get (within {NEARLY:.0%})")


def _answer(count: int | None, what: str) -> str:
    if count is None:
        return f"with none of these numbers of searchers: {what}"
    return f"from {count} searcher{'s' if count > 1 else ''} on: {what}"


def draw_picture(plan: Plan, file: Path) -> bool:
    """Plot the curve; returns whether there was matplotlib to do so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 6), layout="constrained")
    (speed, traffic), (idle, stale) = figure.subplots(2, 2, sharex=True)
    points = [p for p in plan.points if not p.is_drowned]
    many = [p.searchers for p in points]
    speed.plot(many, [p.steps_per_s for p in points], "o-")
    speed.set_ylabel("trainer steps/s")
    traffic.plot(many, [p.searched_per_s for p in points], "o-", label="searched")
    traffic.plot(many, [p.drawn_per_s for p in points], "s--", label="drawn")
    traffic.set_yscale("log")
    traffic.set_ylabel("trajectories/s")
    idle.plot(many, [p.trainer_idle_share for p in points], "o-", label="trainer")
    idle.plot(many, [p.searcher_idle_share for p in points], "s--", label="searchers")
    idle.set_ylim(-0.05, 1.05)
    idle.set_ylabel("share of time idle")
    stale.plot(many, [p.staleness_mean for p in points], "o-", label="mean")
    recent = [math.nan if p.staleness_recent is None else p.staleness_recent for p in points]
    stale.plot(many, recent, "s--", label="mean, m branch")
    stale.plot(many, [p.staleness_p95 for p in points], "^:", label="95 %")
    stale.set_yscale("symlog", linthresh=1)
    stale.set_ylabel("staleness, versions")
    for axes in (speed, traffic, idle, stale):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        if plan.enough is not None:
            axes.axvline(plan.enough, color="grey", linestyle=":", label="enough")
    for axes in (idle, stale):
        axes.set_xlabel("searchers")
    for axes in (traffic, idle, stale):
        axes.legend()
    figure.savefig(file, dpi=120)
    return True
