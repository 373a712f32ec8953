"""`tba pareto`: KL to the reference against win rate, over the checkpoints of runs.

Each kept checkpoint of a run, and its initial model as step 0, is measured as `tba eval` does. The
report is kept in the run folder under `evaluations/` and read the next time, as long as checkpoint
and settings are the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from rich.table import Table

from tba.config import Config, PreferenceTaskConfig
from tba.config.load import load_config
from tba.errors import ConfigError
from tba.eval import Pair, PolicyReport, evaluate_models, find_models
from tba.run.checkpoint import load_step, steps_kept
from tba.run.durable import replace_file, storage_errors
from tba.run.folder import RunFolder
from tba.run.manifest import MANIFEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIN_RATES = {
    "win_rate_given": "win rate against given answers",
    "win_rate_reference": "win rate against the reference's answers",
}
"""What the picture shows over KL, and how it is called."""
_COLUMNS = ("gold_reward", "reward", "length")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One policy."""

    step: int
    """Optimiser steps behind it; 0 is the initial model."""
    report: PolicyReport
    """What `tba eval` tells of it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The policies of one run."""

    run: str
    """Its folder."""
    label: str
    """Its objective, with the folder's name where several runs share it."""
    points: tuple[Point, ...]
    """By step."""


def measure_runs(
    runs: Sequence[Path], overrides: Sequence[str], *, samples: int, tell: Tell
) -> list[Curve]:
    """Measure every kept checkpoint of runs that is not measured yet.

    Args:
        runs: Run folders.
        overrides: Settings on top of each run's own.
        samples: Responses for each held-out query.
        tell: Told of each evaluation that begins.

    Raises:
        RunFolderError: A folder holds no run.
        ConfigError: A run has no gold judge.
        UserError: A model, the task or the judge cannot be used.
    """
    configs = [_config(run, overrides) for run in runs]
    shared = Counter(config.objective.kind for config in configs)
    curves = []
    for run, config in zip(runs, configs, strict=True):
        kind = config.objective.kind
        label = kind if shared[kind] == 1 else f"{kind} ({run.name})"
        points = tuple(_points(RunFolder(run), config, samples, tell))
        curves.append(Curve(str(run), label, points))
    return curves


def table(curves: Sequence[Curve]) -> Table:
    """Return one line a policy."""
    found = Table("run", "step", "KL, nats", *(n.replace("_", " ") for n in _measures()))
    for curve in curves:
        for point in curve.points:
            measured = point.report.measured
            found.add_row(
                curve.label,
                str(point.step),
                f"{point.report.kl:.3f}",
                *(f"{measured[name]:.4g}" if name in measured else "-" for name in _measures()),
            )
    return found


def write(curves: Sequence[Curve], path: Path) -> None:
    """Write everything as JSON.

    Raises:
        StorageError: The disk refused it.
    """
    text = json.dumps([asdict(curve) for curve in curves], indent=1, allow_nan=False)
    with storage_errors(f"results {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [text.encode()])


def draw_picture(curves: Sequence[Curve], path: Path) -> bool:
    """Draw win rate over KL, a curve a run; return whether matplotlib is here to do it.

    Raises:
        StorageError: The disk refused it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    measured = [point.report.measured for curve in curves for point in curve.points]
    shown = [name for name in WIN_RATES if any(name in own for own in measured)]
    figure = Figure(figsize=(5.5 * max(1, len(shown)), 4.5), layout="constrained")
    for column, name in enumerate(shown):
        _draw(figure.add_subplot(1, len(shown), column + 1), curves, name)
    with storage_errors(f"picture {path}"):
        figure.savefig(path, dpi=120)
    return True


def _draw(axes: "Axes", curves: Sequence[Curve], name: str) -> None:
    for curve in curves:
        known = [point for point in curve.points if name in point.report.measured]
        kl = [point.report.kl for point in known]
        rates = [point.report.measured[name] for point in known]
        axes.plot(kl, rates, marker="o", label=curve.label)
        for point, x, y in zip(known, kl, rates, strict=True):
            axes.annotate(
                str(point.step), (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
    axes.axhline(0.5, color="grey", linewidth=0.5)
    axes.set_xlabel("KL to the reference, nats a response")
    axes.set_ylabel(WIN_RATES[name])
    axes.legend(fontsize="small")


def _measures() -> tuple[str, ...]:
    return (*WIN_RATES, *_COLUMNS)


def _config(run: Path, overrides: Sequence[str]) -> Config:
    config = load_config([RunFolder.open(run).config()], overrides)
    if not isinstance(config.task, PreferenceTaskConfig):
        raise ConfigError(
            f"{run} is a run of the task {config.task.kind}, in which no judge tells win rates: "
            "name runs of the task preference"
        )
    if config.task.judge is None:
        raise ConfigError(f"{run} has no gold judge to tell win rates: name one by --task.judge")
    return config


def _points(folder: RunFolder, config: Config, samples: int, tell: Tell) -> Iterator[Point]:
    """Yield the initial model and each kept checkpoint, measured now or before."""
    reference = find_models(str(folder.path), None).reference
    settings = _settings(config, samples)
    steps = [step for step in steps_kept(folder.checkpoints) if step > 0]
    for step in (0, *steps):
        policy, mark = reference, ""
        if step:
            checkpoint = load_step(folder.checkpoints, step)
            policy = str(checkpoint.policy)
            mark = hashlib.sha256((checkpoint.path / MANIFEST).read_bytes()).hexdigest()
        file = folder.evaluations / f"pareto-{step:08d}.json"
        key = {**settings, "checkpoint": mark}
        report = _kept(file, key)
        if report is None:
            tell(f"measuring step {step} of {folder.path}")
            report = evaluate_models(config, Pair(policy, reference), samples=samples, ks=())
            _keep(file, key, report)
        yield Point(step, report)


def _settings(config: Config, samples: int) -> dict[str, Any]:
    """Return what a report depends on, besides the policy."""
    whole = config.model_dump(mode="json")
    return {
        "task": whole["task"],
        "queries": config.evaluation.queries,
        "queries_per_batch": config.evaluation.queries_per_batch,
        "temperature": config.search.temperature,
        "max_completion_length": config.search.max_completion_length,
        "precision": config.search.precision,
        "seed": config.seed,
        "samples": samples,
    }


def _kept(file: Path, key: Mapping[str, Any]) -> PolicyReport | None:
    """Return the report of an earlier call, unless something has changed since."""
    if not file.is_file():
        return None
    found = json.loads(file.read_bytes())
    if found["settings"] != key:
        return None
    return TypeAdapter(PolicyReport).validate_python(found["report"])


def _keep(file: Path, key: Mapping[str, Any], report: PolicyReport) -> None:
    text = json.dumps({"settings": key, "report": asdict(report)}, indent=1, allow_nan=False)
    with storage_errors(f"report {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [text.encode()])
