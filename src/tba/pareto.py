"""`tba pareto`: KL to the reference against win rate, over the checkpoints of runs."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tba.config import Config, PreferenceTaskConfig
from tba.config.load import load_config
from tba.curves import Axis, Curve, Panel, columns_of, draw_panels, titles_of
from tba.errors import ConfigError
from tba.run.folder import RunFolder

WIN_RATES = {
    "win_rate_given": "win rate against given answers",
    "win_rate_reference": "win rate against the reference's answers",
}
"""What the picture shows over KL, and how it is called."""
MEASURES = (*WIN_RATES, "gold_reward", "reward", "length")


def pareto_config(run: Path, overrides: Sequence[str]) -> Config:
    """Return the settings of a run with others on top.

    Raises:
        RunFolderError: The folder holds no run.
        ConfigError: The run has no gold judge.
    """
    config = load_config([RunFolder.open(run).config()], overrides)
    if not isinstance(config.task, PreferenceTaskConfig):
        raise ConfigError(
            f"{run} is a run of the task {config.task.kind}, in which no judge tells win rates: "
            "name runs of the task preference"
        )
    if config.task.judge is None:
        raise ConfigError(f"{run} has no gold judge to tell win rates: name one by --task.judge")
    return config


def table(curves: Sequence[Curve]) -> Table:
    """Return one line a policy."""
    found = Table("run", *titles_of(MEASURES))
    for curve in curves:
        for columns in columns_of(curve.points, MEASURES):
            found.add_row(curve.label, *columns)
    return found


def draw_picture(curves: Sequence[Curve], path: Path) -> bool:
    """Draw win rate over KL, a curve a run; return whether matplotlib is here to do it.

    Raises:
        StorageError: The disk refused it.
    """
    measured = [point.report.measured for curve in curves for point in curve.points]
    kl = Axis("kl", "KL to the reference, nats a response")
    panels = [
        Panel(curves, kl, Axis(name, title), level=0.5)
        for name, title in WIN_RATES.items()
        if any(name in own for own in measured)
    ]
    return draw_panels(panels, path)
