"""Measures of the checkpoints of runs, one over the other: `tba pareto` and `tba transfer`.

Each kept checkpoint of a run, and its initial model as step 0, is measured as `tba eval` does. The
report is kept in the run folder under `evaluations/` and read the next time, as long as checkpoint,
settings, and the files and folders that these name are the same.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from tba.config import Config
from tba.eval import Pair, PolicyReport, evaluate_models, find_models
from tba.run.checkpoint import load_step, steps_kept
from tba.run.durable import replace_file, storage_errors
from tba.run.folder import RunFolder
from tba.run.manifest import MANIFEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Its objective, with the folder's name or path where several runs share it."""
    points: tuple[Point, ...]
    """By step."""


def measure_runs(
    runs: Sequence[Path], configs: Sequence[Config], *, samples: int, tell: Tell
) -> list[Curve]:
    """Measure every kept checkpoint of runs that is not measured yet.

    Args:
        runs: Run folders.
        configs: The settings of each.
        samples: Responses for each held-out query.
        tell: Told of each evaluation that begins.

    Raises:
        RunFolderError: A folder holds no run.
        UserError: A model or the task cannot be used.
    """
    shared = Counter(config.objective.kind for config in configs)
    alike = Counter(run.name for run in runs)
    curves = []
    for run, config in zip(runs, configs, strict=True):
        kind = config.objective.kind
        name = run.name if alike[run.name] == 1 else str(run)
        label = kind if shared[kind] == 1 else f"{kind} ({name})"
        points = tuple(_points(RunFolder(run), config, samples, tell))
        curves.append(Curve(str(run), label, points))
    return curves


@dataclass(frozen=True, slots=True)
class Axis:
    """What is shown in one direction."""

    name: str
    """kl, or what the task measures."""
    title: str
    """What it is called."""

    def of(self, point: Point) -> float | None:
        """Return a policy's number; None where it is not known."""
        return point.report.kl if self.name == "kl" else point.report.measured.get(self.name)


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of curves."""

    curves: Sequence[Curve]
    """Each with a label."""
    x: Axis
    """What is to the right."""
    y: Axis
    """What is up."""
    title: str = ""
    """Stands above."""
    level: float | None = None
    """Where a thin line is drawn across."""


def columns_of(points: Sequence[Point], names: Sequence[str]) -> list[list[str]]:
    """Return the step of each policy, its KL and the named measures, to be read."""
    return [
        [
            str(point.step),
            f"{point.report.kl:.3f}",
            *(
                f"{point.report.measured[name]:.4g}" if name in point.report.measured else "-"
                for name in names
            ),
        ]
        for point in points
    ]


def titles_of(names: Sequence[str]) -> list[str]:
    """Return the headings of these columns."""
    return ["step", "KL, nats", *(name.replace("_", " ") for name in names)]


def write(results: object, path: Path) -> None:
    """Write everything as JSON.

    Raises:
        StorageError: The disk refused it.
    """
    text = json.dumps(results, indent=1, allow_nan=False)
    with storage_errors(f"results {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [text.encode()])


def draw_panels(panels: Sequence[Panel], path: Path) -> bool:
    """Draw pictures side by side; return whether matplotlib is here to do it.

    Raises:
        StorageError: The disk refused it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4.5), layout="constrained")
    for column, panel in enumerate(panels):
        _draw(figure.add_subplot(1, len(panels), column + 1), panel)
    with storage_errors(f"picture {path}"):
        figure.savefig(path, dpi=120)
    return True


def _draw(axes: "Axes", panel: Panel) -> None:
    for curve in panel.curves:
        places = [(point.step, panel.x.of(point), panel.y.of(point)) for point in curve.points]
        known = [(step, x, y) for step, x, y in places if x is not None and y is not None]
        axes.plot(
            [x for _, x, _ in known], [y for *_, y in known], marker="o", label=_plain(curve.label)
        )
        for step, x, y in known:
            axes.annotate(str(step), (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    if panel.level is not None:
        axes.axhline(panel.level, color="grey", linewidth=0.5)
    axes.set_xlabel(panel.x.title)
    axes.set_ylabel(panel.y.title)
    axes.set_title(_plain(panel.title), fontsize="medium")
    axes.legend(fontsize="small")


def _plain(text: str) -> str:
    """Return a text as matplotlib takes it that is no formula."""
    return text.replace("$", r"\$")


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
        key = {**settings, "checkpoint": mark}
        task = hashlib.sha256(json.dumps(key["task"]).encode()).hexdigest()[:8]
        file = folder.evaluations / f"curve-{step:08d}-{task}.json"
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
        "contents": marks_of(whole["task"]),
    }


def marks_of(task: Mapping[str, Any]) -> dict[str, str]:
    """Return a mark of each file and folder that settings name, which changes as they do.

    A file's is its content's. Models are large: a folder's are its files' names, sizes and times.
    """
    names = [name for value in task.values() for name in _texts(value)]
    paths = {name: Path(re.sub(r"(?<=\.py):\w+$", "", name)) for name in names}
    return {name: mark for name, path in paths.items() if (mark := _mark(path))}


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _mark(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        if path.is_file():
            digest.update(path.read_bytes())
        elif path.is_dir():
            for file in sorted(path.iterdir()):
                known = file.stat()
                digest.update(f"{file.name}/{known.st_size}/{known.st_mtime_ns}/".encode())
        else:
            return None
    except (OSError, ValueError):  # no path, but a text
        return None
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a kept file holds."""

    settings: dict[str, Any]
    """What the report depends on."""
    report: PolicyReport
    """The report."""


def _kept(file: Path, key: Mapping[str, Any]) -> PolicyReport | None:
    """Return the report of an earlier call, unless something has changed or the file is broken."""
    try:
        found = TypeAdapter(_Kept).validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    return found.report if found.settings == key else None


def _keep(file: Path, key: Mapping[str, Any], report: PolicyReport) -> None:
    text = json.dumps({"settings": key, "report": asdict(report)}, indent=1, allow_nan=False)
    with storage_errors(f"report {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [text.encode()])
