"""The curve over the number of searchers, and what it says: how many of them a trainer needs."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tba.config import Config
from tba.plan.profile import Profile
from tba.plan.simulation import Setup, Tally, simulate
from tba.records import Int64
from tba.run.durable import replace_file, storage_errors
from tba.run.metrics import staleness_histogram

MAY_WAIT = 0.01
"""Share of its time that a trainer may wait and still be said not to wait."""
NEARLY = 0.05
"""How near to the best of the curve is as good as the best."""
FRESHER = 0.10
"""The same for staleness."""


@dataclass(frozen=True, slots=True)
class Point:
    """What a run with so many searchers comes to."""

    searchers: int
    """N."""
    steps_per_s: float
    """Trainer steps a second."""
    trainer_idle_share: float
    """Share of its time that the trainer waits for searchers."""
    searcher_idle_share: float
    """Share of their time that searchers wait: for a round, or for the trainer to take in."""
    searched_per_s: float
    """Trajectories that reach the buffer, a second."""
    drawn_per_s: float
    """Samples that the trainer draws, a second."""
    reuse: float
    """Samples drawn for each trajectory searched."""
    searched_tokens_per_s: float
    """Response tokens that reach the buffer, a second."""
    trained_tokens_per_s: float
    """Response tokens of the distinct trajectories of each batch, a second."""
    staleness_mean: float
    """Versions, over all samples trained on."""
    staleness_recent: float | None
    """The same of those that the m branch drew; None where it drew none."""
    staleness_median: int
    """Half of the samples are no staler."""
    staleness_p95: int
    """19 of 20 samples are no staler."""
    staleness_histogram: dict[str, int]
    """Samples by staleness, in the bins of metrics.jsonl."""
    is_drowned: bool
    """Whether more arrives than the trainer's process can take in, so that its steps grow longer
    and longer; the figures are then those of its first steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A curve and its answers."""

    setup: Setup
    """What was asked; its number of searchers means nothing."""
    points: list[Point]
    """By number of searchers, ascending."""
    enough: int | None
    """Least number with which the trainer draws no more samples than are searched, and does not
    wait."""
    freshest: int | None
    """Least number with which the m branch is nearly as fresh as it gets on this curve; None where
    it draws nothing."""
    quickest: int | None
    """Least number with which steps come nearly as fast as they get on this curve."""

    def write(self, path: Path) -> None:
        """Write the plan as JSON.

        Raises:
            StorageError: The disk refused it.
        """
        with storage_errors(f"plan {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [json.dumps(dataclasses.asdict(self), indent=2).encode()])


def plan(profile: Profile, config: Config, setup: Setup, searchers: Sequence[int]) -> Plan:
    """Simulate every number of searchers, and look for the least that is enough in between."""
    points: dict[int, Point] = {}

    def at(count: int) -> Point:
        if count not in points:
            own = dataclasses.replace(setup, searchers=count)
            points[count] = point(simulate(profile, config, own), own)
        return points[count]

    asked = sorted(set(searchers))
    curve = [at(count) for count in asked]
    sound = [p for p in curve if not p.is_drowned] or curve
    recent = [p.staleness_recent for p in sound if p.staleness_recent is not None]
    fastest = max(p.steps_per_s for p in sound)
    return Plan(
        setup=setup,
        points=curve,
        enough=_least(asked, at, _is_enough),
        freshest=_least(asked, at, partial(_is_fresh, least=min(recent))) if recent else None,
        quickest=_least(asked, at, lambda p: p.steps_per_s >= fastest * (1 - NEARLY)),
    )


def _is_enough(p: Point) -> bool:
    return p.reuse <= 1 and p.trainer_idle_share <= MAY_WAIT and not p.is_drowned


def _is_fresh(p: Point, least: float) -> bool:
    return p.staleness_recent is not None and p.staleness_recent <= least * (1 + FRESHER)


def _least(
    asked: Sequence[int], at: Callable[[int], Point], holds: Callable[[Point], bool]
) -> int | None:
    """Return the least number for which something holds, searched by halving between two asked."""
    first = next((i for i, count in enumerate(asked) if holds(at(count))), None)
    if first is None:
        return None
    if first == 0:
        return asked[0]  # nothing is known of fewer than were asked for
    low, high = asked[first - 1], asked[first]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(at(middle)) else (middle, high)
    return high


def point(tally: Tally, setup: Setup) -> Point:
    """Turn what was counted into rates and shares."""
    seconds = max(tally.seconds, 1e-9)
    return Point(
        searchers=setup.searchers,
        steps_per_s=tally.steps / seconds,
        trainer_idle_share=tally.waited_s / seconds,
        searcher_idle_share=tally.idle_s / seconds / setup.searchers,
        searched_per_s=tally.trajectories / seconds,
        drawn_per_s=tally.drawn / seconds,
        reuse=tally.drawn / max(tally.trajectories, 1),
        searched_tokens_per_s=tally.tokens_searched / seconds,
        trained_tokens_per_s=tally.tokens_trained / seconds,
        staleness_mean=_mean(tally.staleness),
        staleness_recent=_mean(tally.recent_staleness) if tally.recent_staleness else None,
        staleness_median=_quantile(tally.staleness, 0.5),
        staleness_p95=_quantile(tally.staleness, 0.95),
        staleness_histogram=staleness_histogram(_values(tally.staleness)),
        is_drowned=tally.steps < setup.steps,
    )


def _mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / max(counts.total(), 1)


def _values(counts: Counter[int]) -> Int64:
    return np.repeat(np.array(list(counts), dtype=np.int64), list(counts.values()))


def _quantile(counts: Counter[int], share: float) -> int:
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= share * counts.total():
            return value
    return 0
