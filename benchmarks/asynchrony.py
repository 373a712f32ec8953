"""What it is worth that nobody waits: `free` against `lockstep`, trainer and searcher a core each.

    python -m benchmarks.asynchrony --out build/asynchrony

The model is the recipe `arithmetic`'s with random weights, which a learning rate of 1e-12 keeps as
they are: responses stay long and different, so a step and a search cost the same all the time and
in every mode. The trainer draws from everything ever found. Both processes have one thread, pinned
to a core of its own; in `lockstep` they take turns. A turn costs T_search (the trainer waits) and
T_train (the rest of the time between two steps), so the ideal speed-up of steps/s is
(T_search + T_train) / max(T_search, T_train). It takes for granted that two busy cores do not slow
each other down; how much they do is measured too, with work that has nothing to say to each other,
and the corrected ideal divides by the slower side's time at that speed.

Cases differ in the queries a search takes: as many as make both turns equally long, half, double.
Where search is the longer turn, `free` may do more steps than the ideal, since the trainer goes on
with what there is; so the gain in trajectories found a second stands beside it. `both cores` is
`lockstep` without pinning and with two threads on each side.

Modes take turns, `--repeats` times; all figures are means over the repeats. Every measurement is
kept in `--out`, and a second call goes on where the first one ended.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from benchmarks.arguments import count, keep_to
from benchmarks.cores import in_processes, pin, speeds_of
from benchmarks.watched import run_watched
from tba.api import let_idle_threads_sleep
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.config.load import load_config
from tba.policy.initial import initial_model
from tba.records import StepReport

SHARED = (
    "--warm_start.steps=0",
    "--trainer.learning_rate=1e-12",
    "--trainer.steps=1000000",
    "--trainer.queries_per_batch=32",
    "--search.max_completion_length=32",
    "--buffer.initial_samples=512",
    "--buffer.on_policy_prob=0",
    "--checkpoint.every=0",
)
MODES = {
    "free": ("--sync.mode=free", "--runtime.trainer_threads=1", "--runtime.searcher_threads=1"),
    "lockstep": (
        "--sync.mode=lockstep",
        "--sync.searches_per_round=1",
        "--runtime.trainer_threads=1",
        "--runtime.searcher_threads=1",
    ),
    "both cores": (
        "--sync.mode=lockstep",
        "--sync.searches_per_round=1",
        "--runtime.trainer_threads=2",
        "--runtime.searcher_threads=2",
    ),
}
SEARCHER_CORE, TRAINER_CORE = 0, 1
FIRST_GUESS = 32
"""Queries a search in the run that tells how many make both turns equally long."""
PAIRS = (("loop", "loop"), ("matmul", "matmul"), ("search", "training"))
"""What is run side by side to see whether the cores slow each other down."""
WARM_S = 3.0
"""Seconds of steps that are left out at the start."""

Facts = dict[str, float]


def main() -> None:
    """Measure what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/asynchrony"))
    parser.add_argument("--seconds", type=float, default=25, help="of each run")
    parser.add_argument("--repeats", type=count, default=3)
    arguments = parser.parse_args()
    keep_to(parser, arguments, "seconds")
    let_idle_threads_sleep()
    disable_progress_bar()
    out: Path = arguments.out
    untrained = load_config(["arithmetic"], SHARED)
    model = initial_model(untrained, out / "model", torch.device("cpu"), print)
    bench = Bench(out, model, arguments.seconds)
    slowed = bench.contention()
    cases = bench.cases()
    turns = [
        (name, queries, mode, repeat)
        for repeat in range(arguments.repeats)
        for name, queries in cases.items()
        for mode in MODES
    ]
    runs: dict[tuple[str, str], list[Facts]] = {}
    for name, queries, mode, repeat in turns:
        runs.setdefault((name, mode), []).append(bench.run(queries, mode, repeat))
    page = "\n".join([*contention_lines(slowed), "", *lines(cases, _means(runs), slowed)])
    (out / "table.md").write_text(page + "\n")
    print(page)


def _load(mode: str, queries: int, model: str) -> Config:
    own = [
        f"--search.queries_per_batch={queries}",
        "--model.build=none",
        f"--model.model_name_or_path={model}",
    ]
    return load_config(["arithmetic"], [*SHARED, *MODES[mode], *own])


def _means(runs: dict[tuple[str, str], list[Facts]]) -> dict[tuple[str, str], Facts]:
    return {
        key: {name: fmean(facts[name] for facts in repeats) for name in repeats[0]}
        for key, repeats in runs.items()
    }


@dataclass(frozen=True)
class Bench:
    """Measures in processes of their own, and keeps what was measured."""

    out: Path
    """Where measurements are kept."""
    model: str
    """Folder of the policy."""
    seconds: float
    """Length of each measurement."""

    def run(self, queries: int, mode: str, repeat: int) -> Facts:
        """Return what a run of so many queries a search comes to: `Timer.facts`."""
        name = f"{mode.replace(' ', '-')}-{queries}-{repeat}"
        arguments = (self.model, queries, mode, self.seconds, self.out / name)
        facts = self._kept(name, lambda: in_processes(_train, [arguments])[0])
        print(f"{name}: {facts['steps_per_s']:.2f} steps/s", flush=True)
        return facts

    def cases(self) -> dict[str, int]:
        """Return the queries a search takes in each case."""
        facts = self.run(FIRST_GUESS, "lockstep", 0)
        balanced = round(FIRST_GUESS * facts["train_s"] / facts["search_s"])
        return {
            "balanced": balanced,
            "search half as long": max(1, balanced // 2),
            "search twice as long": 2 * balanced,
        }

    def contention(self) -> Facts:
        """Return, for each kind of work, its time beside the other one over its time alone."""
        slowed = {}
        for on_first, on_second in PAIRS:
            kinds = ((on_first, SEARCHER_CORE), (on_second, TRAINER_CORE))
            alone = [self.speeds([kind])[0] for kind in dict.fromkeys(kinds)]
            both = self.speeds(list(kinds))
            slowed |= {
                f"{kind} beside {other}": before / after
                for kind, other, before, after in zip(
                    (on_first, on_second), (on_second, on_first), alone, both, strict=True
                )
            }
        return slowed

    def speeds(self, kinds: Sequence[tuple[str, int]]) -> list[float]:
        """Return turns a second of each kind of work, done at the same time."""
        name = "speed-" + "-".join(f"{kind}{core}" for kind, core in kinds)
        config = _load("free", FIRST_GUESS, self.model)
        found = self._kept(name, lambda: speeds_of(kinds, config, self.seconds / 2))
        print(name, " ".join(f"{speed:.2f}" for speed in found), "a second", flush=True)
        return found

    def _kept(self, name: str, measure: Callable[[], Any]) -> Any:
        file = self.out / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(measure()))
        return json.loads(file.read_text())


# --- a run of trainer and searcher
# ------------------------------------------------------------------------------------------------


@dataclass
class Timer:
    """Watches a run: pins its processes, times its steps, ends it."""

    seconds: float
    pinned: bool
    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    def ready(self) -> None:
        """Give the searchers, with all that they started, the other core."""
        if self.pinned:
            for process in multiprocessing.active_children():
                pin(process.pid or 0, SEARCHER_CORE)

    def stepped(
        self, report: StepReport, model: nn.Module, buffer: ReplayBuffer, stop: Callable[[], None]
    ) -> None:
        """Note the time of a step."""
        del model
        self.times.append(time.perf_counter())
        self.waits.append(report.metrics["wait_s"])
        self.found.append(buffer.kept + buffer.duplicate)
        if self.times[-1] - self.times[0] > self.seconds + WARM_S:
            stop()

    def facts(self) -> Facts:
        """Return speeds and times of a step, after the warm-up."""
        first = next(i for i, t in enumerate(self.times) if t - self.times[0] >= WARM_S)
        steps = len(self.times) - 1 - first
        period = (self.times[-1] - self.times[first]) / steps
        wait = fmean(self.waits[first + 1 :])
        found = (self.found[-1] - self.found[first]) / (steps * period)
        return {
            "steps_per_s": 1 / period,
            "search_s": wait,
            "train_s": period - wait,
            "idle_share": wait / period,
            "found_per_s": found,
        }


def _train(pipe: Any, model: str, queries: int, mode: str, seconds: float, folder: Path) -> None:
    pinned = mode != "both cores"
    if pinned:
        pin(os.getpid(), TRAINER_CORE)
    config = _load(mode, queries, model)
    timer = Timer(seconds, pinned)
    run_watched(config, folder, timer)
    shutil.rmtree(folder)
    pipe.send(timer.facts())


# --- tables
# ------------------------------------------------------------------------------------------------


def contention_lines(slowed: Facts) -> Iterable[str]:
    """Yield how much two busy cores slow each other down, as Markdown."""
    yield "| work | time beside the other / time alone |"
    yield "|---|---|"
    for name, factor in slowed.items():
        yield f"| {name} | {factor:.3f} |"


def ideal(search_s: float, train_s: float) -> float:
    """Return the speed-up of steps/s if both sides work at once at the speed they have alone."""
    return (search_s + train_s) / max(search_s, train_s)


def corrected_ideal(search_s: float, train_s: float, slowed: Facts) -> float:
    """Return the same if both slow each other down as the measured work does."""
    longer = max(
        search_s * slowed["search beside training"], train_s * slowed["training beside search"]
    )
    return (search_s + train_s) / longer


def lines(
    cases: dict[str, int], runs: dict[tuple[str, str], Facts], slowed: Facts
) -> Iterable[str]:
    """Yield the table of the cases as Markdown."""
    yield (
        "| case | queries a search | T_search / T_train, ms | lockstep / both cores / free, steps/s"
        " | speed-up | of the ideal | of the corrected ideal | found/s, speed-up | trainer idle"
        " | free / both cores |"
    )
    yield "|---" * 10 + "|"
    for case, queries in cases.items():
        free, turns, both = (runs[case, mode] for mode in ("free", "lockstep", "both cores"))
        times = (turns["search_s"], turns["train_s"])
        gain = free["steps_per_s"] / turns["steps_per_s"]
        best, corrected = ideal(*times), corrected_ideal(*times, slowed)
        speeds = (turns["steps_per_s"], both["steps_per_s"], free["steps_per_s"])
        yield " | ".join(
            [
                f"| {case}",
                f"{queries}",
                f"{1e3 * times[0]:.0f} / {1e3 * times[1]:.0f}",
                " / ".join(f"{speed:.2f}" for speed in speeds),
                f"{gain:.2f}",
                f"{gain / best:.2f} of {best:.2f}",
                f"{gain / corrected:.2f} of {corrected:.2f}",
                f"{free['found_per_s'] / turns['found_per_s']:.2f}",
                f"{100 * free['idle_share']:.2f} %",
                f"{free['steps_per_s'] / both['steps_per_s']:.2f} |",
            ]
        )


if __name__ == "__main__":
    main()
