"""Methods side by side on one task: each trains as long as the others from the same policy.

A finished entrant is kept in `out`/NAME-SEED.json and not trained again, so a second call goes on
where the first one ended. Training time starts when every searcher has loaded its models and ends
after the step on which it is up; evaluation is the package's own, afterwards, of the last weights
and of earlier checkpoints where the budget wants them.
"""

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import count, names
from benchmarks.watched import run_watched
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.config.load import load_config
from tba.eval import Pair, evaluate_models
from tba.records import StepReport
from tba.run.checkpoint import load_step, steps_kept
from tba.run.durable import replace_file
from tba.runtimes.resources import available_cores

ENDLESS = 10**6
"""Steps of a run that its clock ends."""

Look = Callable[[Path], dict[str, Any]]
"""Reads figures from a run's folder."""
Figure = Callable[[dict[str, Any]], float]
"""Takes one figure from a result."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A method with its settings."""

    name: str
    """How it is called in tables."""
    overrides: tuple[str, ...]
    """Settings on top of the common ones."""

    def at(self, rate: str) -> "Entrant":
        """Return this method with a learning rate, and that in its name."""
        return Entrant(
            f"{self.name}-at-{rate}", (*self.overrides, f"--trainer.learning_rate={rate}")
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """How long each entrant trains, and which of its policies are measured."""

    seconds: float = math.inf
    """Training time, after which a run ends."""
    steps: int = ENDLESS
    """Optimiser steps, after which a run ends."""
    checkpoints: int = 1
    """Policies that are measured, at even distances; more than the last one need `steps`."""

    def overrides(self) -> list[str]:
        """Return the settings of a run that is given this."""
        every = self.steps // self.checkpoints if self.checkpoints > 1 else 0
        return [
            f"--trainer.steps={self.steps}",
            f"--checkpoint.every={every}",
            f"--checkpoint.keep={self.checkpoints}",
        ]


class Clock:
    """Ends a run after some seconds of training."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started: float | None = None
        self.trained_s = 0.0
        """Seconds of training so far."""
        self.steps = 0
        """Steps so far."""
        self.staleness: list[float] = []
        """Mean of each step's batch, in versions."""
        self.curve: list[tuple[float, int]] = []
        """At the end of each step: seconds of training, and trajectories that had arrived."""

    def ready(self) -> None:
        """Begin to count."""
        self._started = time.perf_counter()

    def stepped(
        self, report: StepReport, model: nn.Module, buffer: ReplayBuffer, stop: Callable[[], None]
    ) -> None:
        """Count a step; end the run when the time is up."""
        del model
        if self._started is None:
            return
        self.steps = report.step
        self.staleness.append(report.metrics["staleness_mean"])
        self.trained_s = time.perf_counter() - self._started
        arrived = buffer.kept + buffer.duplicate + buffer.excluded
        self.curve.append((self.trained_s, arrived))
        if self.trained_s >= self._seconds:
            stop()


def parser(description: str, name: str, methods: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all comparisons have.

    Args:
        description: What the comparison is.
        name: Folder in build/ of its results, where no other is given.
        methods: Names of all that can be compared.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build") / name)
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--methods", type=names(methods, "method"), default=list(methods))
    return parser


def results(
    base: Sequence[str | Config],
    entrants: Sequence[Entrant],
    out: Path,
    *,
    common: Sequence[str],
    budget: Budget,
    seeds: Sequence[int],
    samples: int,
    look: Look | None = None,
) -> list[dict[str, Any]]:
    """Train and evaluate every entrant with every seed; return one result each.

    Args:
        base: Recipe and files that all have in common.
        entrants: The methods.
        out: Folder of the results.
        common: Settings that all have in common, on top of `base`.
        budget: When each ends.
        seeds: One after the other, so that what there is can be compared at any time.
        samples: Responses sampled for each held-out query.
        look: Adds to each result what else its run folder tells, before that is deleted.
    """
    found = []
    for seed in seeds:
        for entrant in entrants:
            path = out / f"{entrant.name}-{seed}.json"
            if not path.is_file():
                own = [f"--seed={seed}", *budget.overrides()]
                config = load_config(base, [*common, *entrant.overrides, *own])
                found.append(_result(entrant, config, path, Clock(budget.seconds), samples, look))
                replace_file(path, [json.dumps(found[-1]).encode()])
            else:
                found.append(json.loads(path.read_text()))
            print(line(found[-1]), flush=True)
    return found


def _result(
    entrant: Entrant, config: Config, path: Path, clock: Clock, samples: int, look: Look | None
) -> dict[str, Any]:
    folder = path.with_suffix("")
    threads = torch.get_num_threads()
    summary = run_watched(config, folder, clock)
    torch.set_num_threads(available_cores())
    result = {
        "method": entrant.name,
        "seed": config.seed,
        "learning_rate": config.trainer.learning_rate,
        "seconds": clock.trained_s,
        "steps": clock.steps,
        "staleness": statistics.fmean(clock.staleness),
        "curve": clock.curve,
        "trainer_idle_share": summary.trainer_idle_share,
        "searched": summary.trajectories.kept + summary.trajectories.duplicate,
    }
    reports = list(_reports(config, folder / "checkpoints", samples))
    result |= {"report": reports[-1][1], "reports": reports}
    if look is not None:
        result |= look(folder)
    torch.set_num_threads(threads)
    shutil.rmtree(folder)
    return result


def _reports(
    config: Config, checkpoints: Path, samples: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the steps and the evaluation of each checkpoint that a run has left."""
    initial = str(config.model.model_name_or_path)
    for step in steps_kept(checkpoints):
        models = Pair(str(load_step(checkpoints, step).policy), initial)
        report = evaluate_models(config, models, samples=samples, ks=[1])
        yield step, dataclasses.asdict(report)


def start(base: Sequence[str | Config], common: Sequence[str], samples: int) -> dict[str, Any]:
    """Return the evaluation of the policy with which all begin."""
    config = load_config(base, [*common])
    model = str(config.model.model_name_or_path)
    torch.set_num_threads(available_cores())
    return dataclasses.asdict(evaluate_models(config, Pair(model, model), samples=samples, ks=[1]))


def line(result: dict[str, Any]) -> str:
    """Say in a line what came of an entrant."""
    report = result["report"]
    known = [f"KL {report['kl']:.3f}"]
    known += [f"{name} {value:.3f}" for name, value in report["measured"].items()]
    if report["greedy_pass_at_1"] is not None:  # a task that knows right and wrong
        sampled, greedy = _first(report["pass_at"]), report["greedy_pass_at_1"]
        known = [f"sampled {sampled:.3f}", f"greedy {greedy:.3f}", *known]
    return f"{result['method']} {result['seed']}: {result['steps']} steps, {', '.join(known)}"


def _first(pass_at: dict[Any, float]) -> float:
    return next(iter(pass_at.values()), math.nan)


def spread(results: Sequence[dict[str, Any]], figure: Figure) -> str:
    """Return mean and standard error of a figure over seeds."""
    values = [figure(result) for result in results]
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    return f"{mean:.3f} +- {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def by_method(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each method with its results, in the order of their first."""
    for name in dict.fromkeys(result["method"] for result in results):
        yield name, [result for result in results if result["method"] == name]
