"""The whole against TRL: how soon, from the same policy, is the same held-out accuracy reached?

    python -m benchmarks.end_to_end --out build/end_to_end
    python -m benchmarks.end_to_end --recipe sums-smollm2 --model DIR --out build/end_to_end_smollm2

All contestants begin with one policy (the recipe's warm start, made once) and have the same
prompts, reward, K, batch (completions a step) and two cores:

    trl-RATE   TRL's GRPOTrainer (`benchmarks.trl_grpo` says how it is set up), once a rate, for
               `--minutes` each; of several ways to use the cores the one that is measured quickest
    free       the recipe as it stands: trainer and searcher a thread each
    lockstep   the recipe with `sync.mode = "lockstep"`; trainer and searcher take turns, so each
               has both cores

The mark is the best held-out sampled pass@1 that TRL reaches with any rate at any time. A run keeps
its weights every 1/120 of `--minutes` (1/30 with SmolLM2, 1 s at least), and they are evaluated
afterwards (`benchmarks.snapshots`). Training time starts when imports and loading are over, those
of the searcher included; keeping weights is not counted against TRL, but it is against the package.
A contestant's result is kept in `--out`/NAME.json and not computed again; a second call goes on
where the first one ended.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import get_context
from transformers.utils.logging import disable_progress_bar

from benchmarks.arguments import keep_to, learning_rates, names
from benchmarks.snapshots import Snapshots, grade
from benchmarks.trl_grpo import Layout, TrlJob, train_trl
from benchmarks.watched import run_watched
from tba.api import let_idle_threads_sleep
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.config.load import load_config
from tba.policy.initial import initial_model
from tba.records import StepReport
from tba.runtimes.resources import available_cores

RATES = {
    "arithmetic": ("2.5e-4", "5e-4", "1e-3", "2e-3"),
    "sums-smollm2": ("1e-5", "2e-5", "3e-5", "6e-5"),
}
"""Of TRL; for `arithmetic`, 3e-4 is slow and 3e-3 collapses within a minute."""
SNAPSHOTS = {"arithmetic": 120, "sums-smollm2": 30}
"""Of each TRL run, at most; others keep weights as often."""
TRIAL_SHARE = 1 / 15
"""Of a TRL run's time for trying each layout."""
MODES = ("free", "lockstep")
"""The package's contestants."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Race:
    """What all contestants share."""

    config: Config
    """The recipe, beginning with the shared policy."""
    sources: tuple[str, ...]
    """What `config` was loaded from: the recipe, and settings on top of it."""
    model: str
    """Folder of the policy with which all begin."""
    out: Path
    """Where results go."""
    seconds: float
    """Training time of TRL, and the most that others get."""
    every_s: float
    """Training time between two snapshots."""


def main() -> None:
    """Run the contestants that have no result yet, then print and draw the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/end_to_end"))
    parser.add_argument("--recipe", choices=RATES, default="arithmetic")
    parser.add_argument("--model", help="folder of the policy, for a recipe that names none")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--rates", type=learning_rates, help="TRL's learning rates (default: the recipe's four)"
    )
    parser.add_argument(
        "--only", type=names(("trl", *MODES), "contestant"), default=["trl", *MODES]
    )
    arguments = parser.parse_args()
    keep_to(parser, arguments, "recipe", "model", "minutes")
    let_idle_threads_sleep()
    disable_progress_bar()
    race = prepare(arguments)
    if "trl" in arguments.only:
        layout = quickest_layout(race)
        for rate in arguments.rates or RATES[arguments.recipe]:
            result(race, f"trl-{rate}", partial(_run_trl, race, float(rate), layout))
    for mode in MODES:
        if mode in arguments.only:
            result(race, mode, partial(_run_package, race, mode))
    results = read_results(race.out)
    page = "\n".join(lines(results))
    (race.out / "table.md").write_text(page + "\n")
    print(page)
    draw(results, race.out / "end_to_end.png")


def prepare(arguments: argparse.Namespace) -> Race:
    """Make the policy with which all begin, unless it is there."""
    out: Path = arguments.out
    model = [f"--model.model_name_or_path={arguments.model}"] if arguments.model else []
    initial = load_config([arguments.recipe], model)
    folder = initial_model(initial, out / "model", torch.device("cpu"), print)
    own = [f"--model.model_name_or_path={folder}", "--warm_start.steps=0"]
    own += ["--model.build=none"] if initial.model.build is not None else []
    sources = (arguments.recipe, *own)
    config = load_config([arguments.recipe], own)
    seconds = 60 * arguments.minutes
    every_s = max(1.0, seconds / SNAPSHOTS[arguments.recipe])
    return Race(config, sources, folder, out, seconds, every_s)


def result(race: Race, name: str, run: Callable[[Path], Result]) -> Result:
    """Return a contestant's result, running and grading it if there is none yet."""
    file = race.out / f"{name}.json"
    if file.exists():
        return json.loads(file.read_text())
    folder = race.out / name
    folder.mkdir(exist_ok=True)
    print(f"{name}: training", flush=True)
    facts = run(folder)
    print(f"{name}: evaluating", flush=True)
    points = grade(folder / "snapshots", race.config, race.model)
    whole = {"name": name, **facts, "points": points}
    file.write_text(json.dumps(whole, indent=1))
    shutil.rmtree(folder)  # its weights may take gigabytes
    best = max(point["pass_at_1"] for point in points)
    print(f"{name}: best {best:.3f}, {_per_s(facts, 'learned')} completions/s")
    return whole


# --- TRL
# ------------------------------------------------------------------------------------------------


def layouts(config: Config) -> list[Layout]:
    """Return the ways to use the cores that are tried; bf16 only where the recipe has it."""
    cores = available_cores()
    precisions = [False, True] if config.trainer.precision == "bfloat16" else [False]
    return [
        Layout(processes, cores // processes, passes, bf16)
        for bf16 in precisions
        for processes in sorted({1, cores})
        for passes in (1, 4)
    ]


def quickest_layout(race: Race) -> Layout:
    """Return the layout in which TRL learns from most completions a second, tried once."""
    file = race.out / "layouts.json"
    if not file.exists():
        rates = []
        for layout in layouts(race.config):
            job = _trl_job(race, race.out / "trial", 1e-6, layout, race.seconds * TRIAL_SHARE)
            facts = _in_folder(job.folder, lambda job=job: train_trl(job))
            rates.append({**asdict(layout), "per_s": facts["learned"] / facts["seconds"]})
            print(f"TRL with {layout}: {rates[-1]['per_s']:,.0f} completions/s", flush=True)
        file.write_text(json.dumps(rates, indent=1))
    best = max(json.loads(file.read_text()), key=lambda rate: rate["per_s"])
    return Layout(**{name: value for name, value in best.items() if name != "per_s"})


def _in_folder(folder: Path, run: Callable[[], Result]) -> Result:
    folder.mkdir(exist_ok=True)
    try:
        return run()
    finally:
        shutil.rmtree(folder)


def _trl_job(race: Race, folder: Path, rate: float, layout: Layout, seconds: float) -> TrlJob:
    return TrlJob(race.config, race.model, folder, rate, layout, seconds, race.every_s)


def _run_trl(race: Race, rate: float, layout: Layout, folder: Path) -> Result:
    facts = train_trl(_trl_job(race, folder, rate, layout, race.seconds))
    return {"learning_rate": rate, "layout": str(layout), **facts}


# --- the package
# ------------------------------------------------------------------------------------------------


class Recorder:
    """Watches a run of the package: keeps weights, counts, and ends it when its time is up."""

    def __init__(self, race: Race, config: Config, folder: Path, created: float) -> None:
        dtype = getattr(torch, config.search.dtype)
        self._snapshots = Snapshots(folder / "snapshots", every_s=race.every_s, dtype=dtype)
        self._per_step = config.trainer.queries_per_batch * config.trainer.samples_per_query
        self._limit_s = race.seconds
        self._last_step = config.trainer.steps
        self._created = created
        self._origin = 0.0
        self.facts: Result = {"learned": 0, "distinct": 0.0, "saving_s": 0.0, "wait_s": 0.0}

    def ready(self) -> None:
        """Start the clock: the searchers have loaded what they need."""
        self._origin = time.perf_counter()
        self.facts["start_s"] = time.time() - self._created

    def stepped(
        self, report: StepReport, model: nn.Module, buffer: ReplayBuffer, stop: Callable[[], None]
    ) -> None:
        """Note one step."""
        seconds = time.perf_counter() - self._origin
        metrics, facts = report.metrics, self.facts
        facts["learned"] += 0 if metrics["skipped"] else self._per_step
        facts["distinct"] += metrics["unique_share"] * self._per_step
        facts["wait_s"] += metrics["wait_s"]
        found = buffer.kept + buffer.duplicate
        facts |= {"seconds": seconds, "steps": report.step, "found": found, "new": buffer.kept}
        if self._snapshots.due(seconds) or report.step == self._last_step:
            self._snapshots.keep(model, seconds, step=report.step)
            facts["saving_s"] += time.perf_counter() - self._origin - seconds
        if seconds >= self._limit_s:
            stop()


def _run_package(race: Race, mode: str, folder: Path) -> Result:
    process = get_context("spawn").Process(
        target=_train_package, args=(race, mode, folder, time.time())
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the {mode} run ended with exit code {process.exitcode}")
    return json.loads((folder / "run.json").read_text())


def _train_package(race: Race, mode: str, folder: Path, created: float) -> None:
    recipe, *settings = race.sources
    config = load_config([recipe], [*settings, *_settings_of(mode)])
    recorder = Recorder(race, config, folder, created)
    run_watched(config, folder / "run", recorder)
    (folder / "run.json").write_text(json.dumps(recorder.facts))


def _settings_of(mode: str) -> list[str]:
    """Return what differs from the recipe: who takes turns can have all cores each time."""
    if mode == "free":
        return []
    sides = ("trainer", "searcher")
    threads = [f"--runtime.{side}_threads={available_cores()}" for side in sides]
    return ["--sync.mode=lockstep", *threads]


# --- the table
# ------------------------------------------------------------------------------------------------


def read_results(out: Path) -> list[Result]:
    """Return the results that there are, TRL's first."""
    files = [*sorted(out.glob("trl-*.json")), *(out / f"{mode}.json" for mode in MODES)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def best_of(points: Sequence[Result]) -> tuple[float, float]:
    """Return the highest pass@1 and the seconds after which it was first reached."""
    point = max(points, key=lambda point: (point["pass_at_1"], -point["seconds"]))
    return point["pass_at_1"], point["seconds"]


def seconds_to(points: Sequence[Result], mark: float) -> float | None:
    """Return the seconds after which pass@1 was first at the mark or above."""
    reached = (point["seconds"] for point in points if point["pass_at_1"] >= mark)
    return min(reached, default=None)


def the_mark(results: Sequence[Result]) -> Result | None:
    """Return the TRL run with the highest pass@1 at any time."""
    theirs = [result for result in results if result["name"].startswith("trl-")]
    return max(theirs, key=lambda result: best_of(result["points"])[0], default=None)


def lines(results: Sequence[Result]) -> Iterable[str]:
    """Yield the table as Markdown, and what it comes to."""
    marked = the_mark(results)
    mark, mark_s = best_of(marked["points"]) if marked else (float("nan"), float("nan"))
    yield (
        "| contestant | first / last / best pass@1 | best at, s | mark reached at, s | learned/s "
        "| distinct learned/s | found/s | new/s | steps | start, s |"
    )
    yield "|---" * 10 + "|"
    for result in results:
        points = result["points"]
        best, best_s = best_of(points)
        reached = seconds_to(points, mark)
        yield " | ".join(
            [
                f"| {result['name']}",
                f"{points[0]['pass_at_1']:.3f} / {points[-1]['pass_at_1']:.3f} / {best:.3f}",
                f"{best_s:.0f}",
                "never" if reached is None else f"{reached:.1f}",
                *(_per_s(result, name) for name in ("learned", "distinct", "found", "new")),
                f"{result['steps']}",
                f"{result['start_s']:.1f} |",
            ]
        )
    if marked:
        yield ""
        yield f"The mark is {mark:.3f}, which {marked['name']} ({marked['layout']}) reached first "
        yield f"after {mark_s:.0f} s."
        for result in results:
            if result["name"] in MODES:
                yield _against(result, marked, mark, mark_s)


def _per_s(result: Result, name: str) -> str:
    """Return how many a second to three digits, or a dash where it is not counted."""
    if name not in result:
        return "-"
    speed = result[name] / result["seconds"]
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _against(result: Result, marked: Result, mark: float, mark_s: float) -> str:
    reached = seconds_to(result["points"], mark)
    speed = result["learned"] / result["seconds"] / (marked["learned"] / marked["seconds"])
    sooner = "never reached it" if reached is None else f"reached it {mark_s / reached:.1f}x sooner"
    return f"`{result['name']}` {sooner} and learnt from {speed:.1f}x as many completions a second."


def draw(results: Sequence[Result], file: Path) -> None:
    """Plot held-out pass@1 over seconds, if matplotlib is there."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    for result in results:
        seconds, scores = zip(
            *((point["seconds"], point["pass_at_1"]) for point in result["points"]), strict=True
        )
        style = {"linewidth": 2.5} if result["name"] in MODES else {"linestyle": "--"}
        axes.plot(seconds, scores, label=result["name"], **style)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out sampled pass@1")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
