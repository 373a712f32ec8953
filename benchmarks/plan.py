"""What `tba plan` predicts against what runs do: recipe `arithmetic`, 1 to 4 local searchers.

    python -m benchmarks.plan --out build/plan

Each round measures a profile, predicts from it, and trains with each number of searchers right
after, since the speed of a machine drifts. All start from one warm-started policy, which a tiny
learning rate holds still: a profile is of one policy, and one that learns changes what steps cost.
Steps count from `--from-step` on, after more than a second. What other programs took of the
processors during a run is taken off those of its prediction, and where it was much, the run is left
out of the medians. Rounds are kept in `--out`/rounds.jsonl, and a second call adds to them.
"""

import argparse
import dataclasses
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tba
from tba.api import let_idle_threads_sleep
from tba.config import Config
from tba.config.load import load_config
from tba.plan.measure import measure
from tba.plan.planning import Point, point
from tba.plan.simulation import Setup, simulate
from tba.policy.initial import initial_model
from tba.run.rollouts import RolloutLog

SEARCHERS = (1, 2, 3, 4)
QUIET = 0.3
"""Cores that other programs may use beside a run that counts."""
SAMPLE_S = 0.25
TICKS = os.sysconf("SC_CLK_TCK")
NAMES = {
    "steps_per_s": "steps/s",
    "searched_per_s": "trajectories/s",
    "tokens_per_step": "tokens a step",
    "staleness_mean": "staleness",
}


@dataclass(frozen=True)
class Seen:
    """What a run did, or will do."""

    steps_per_s: float
    """Trainer steps a second."""
    searched_per_s: float
    """Trajectories searched, a second."""
    tokens_per_step: float
    """Response tokens of the distinct trajectories of a batch."""
    staleness_mean: float
    """Of the samples trained on, in versions."""


def main() -> None:
    """Predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/plan"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--from-step", type=int, default=40)
    arguments = parser.parse_args()
    let_idle_threads_sleep()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    config = _config(out, arguments.steps)
    for _ in range(arguments.rounds):
        for line in _round(config, out, arguments.from_step):
            print(json.dumps(line), flush=True)
            with (out / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    page = "\n".join(table(rounds))
    (out / "table.md").write_text(page + "\n")
    print(page)


def _config(out: Path, steps: int) -> Config:
    model = initial_model(load_config(["arithmetic"]), out / "model", torch.device("cpu"), print)
    own = ["--model.build=none", "--warm_start.steps=0", f"--model.model_name_or_path={model}"]
    short = [f"--trainer.steps={steps}", "--evaluation.queries=64", "--checkpoint.every=0"]
    still = ["--trainer.learning_rate=1e-9"]
    return load_config(["arithmetic"], [*own, *short, *still])


def _round(config: Config, out: Path, from_step: int) -> Iterator[dict[str, Any]]:
    """Measure a profile, then every run; yield a line for each run.

    What other programs take of the processors during a run is taken off those of its prediction.
    """
    profile = measure(config, lambda text: None)
    profile.write(out / "profile.json")
    for count in SEARCHERS:
        with _watched() as samples:
            seen, window = _train(config, count, out / f"run-{count}", from_step)
        others = _others(samples, window)
        left = dataclasses.replace(profile, places=profile.places - others)
        setup = Setup(count, warm_up=from_step, steps=config.trainer.steps - from_step)
        yield {
            "searchers": count,
            "predicted": dataclasses.asdict(
                _predicted(point(simulate(left, config, setup), setup))
            ),
            "measured": dataclasses.asdict(seen),
            "others": others,
            "slowdown": [profile.trainer_slowdown, profile.searcher_slowdown],
        }


@dataclass(frozen=True)
class Sample:
    """Processor seconds up to a moment."""

    time: float
    """Since 1970."""
    busy_s: float
    """Of all processors of this machine."""
    own_s: dict[int, float]
    """Of each process of this program."""


@contextmanager
def _watched() -> Iterator[list[Sample]]:
    """Take samples during the block."""
    samples: list[Sample] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            samples.append(Sample(time.time(), _busy_s(), dict(_own_s())))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield samples
    ended.set()
    watcher.join()


def _others(samples: list[Sample], window: tuple[float, float]) -> float:
    """Return the cores that other programs used within a window of time."""
    inside = [sample for sample in samples if window[0] <= sample.time <= window[1]]
    first, last = inside[0], inside[-1]
    own = sum(last.own_s[process] - first.own_s.get(process, 0.0) for process in last.own_s)
    return max(last.busy_s - first.busy_s - own, 0.0) / (last.time - first.time)


def _own_s() -> Iterator[tuple[int, float]]:
    """Yield the processor seconds of each process of this program's group."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has just ended
        if int(words[2]) == os.getpgrp():
            yield int(folder.name), (int(words[11]) + int(words[12])) / TICKS


def _busy_s() -> float:
    """Return the seconds that all processors of this machine have worked so far."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(word) for word in words[:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS  # less idle, waiting


def _train(
    config: Config, searchers: int, folder: Path, from_step: int
) -> tuple[Seen, tuple[float, float]]:
    """Train with so many searchers; return what was seen, and when counting began and ended."""
    search = config.search.model_copy(update={"searchers": searchers})
    own = config.model_copy(update={"search": search})
    tba.train(own, run_dir=folder, clean=folder.exists(), progress=False)
    texts = (folder / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, texts) if "loss" in line]
    first, last, counted = lines[from_step - 1], lines[-1], lines[from_step:]
    seconds = last["time"] - first["time"]
    # the rate is that since the initial fill, which the first line ends; for a second it is 0
    tokens = [
        line["search_tokens_per_s"] * (line["time"] - lines[0]["time"]) for line in (first, last)
    ]
    assert tokens[0] > 0, "--from-step lies within the first second"
    seen = Seen(
        steps_per_s=len(counted) / seconds,
        searched_per_s=(tokens[1] - tokens[0]) / seconds / _mean_length(folder),
        tokens_per_step=statistics.fmean(line["tokens_trained"] for line in counted),
        staleness_mean=statistics.fmean(line["staleness_mean"] for line in counted),
    )
    return seen, (first["time"], last["time"])


def _mean_length(folder: Path) -> float:
    """Return the mean length of the run's responses, in tokens."""
    with RolloutLog(folder / "rollouts.arrows") as log:
        lengths = [len(tokens) for batch in log.read() for tokens in batch.column("tokens")]
    return statistics.fmean(lengths)


def _predicted(of: Point) -> Seen:
    return Seen(
        steps_per_s=of.steps_per_s,
        searched_per_s=of.searched_per_s,
        tokens_per_step=of.trained_tokens_per_s / of.steps_per_s,
        staleness_mean=of.staleness_mean,
    )


def table(rounds: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table as Markdown: medians over quiet rounds, of each figure and of its ratio."""
    heads = [f"{name}: predicted | measured | ratio" for name in NAMES.values()]
    yield "| searchers | rounds | " + " | ".join(heads) + " |"
    yield "|---" * (2 + 3 * len(NAMES)) + "|"
    for count in sorted({line["searchers"] for line in rounds}):
        own = [r for r in rounds if r["searchers"] == count and r["others"] <= QUIET]
        cells = [_cell(own, name) for name in NAMES] if own else ["| |"] * len(NAMES)
        yield f"| {count} | {len(own)} | " + " | ".join(cells) + " |"


def _cell(rounds: list[dict[str, Any]], name: str) -> str:
    predicted = [line["predicted"][name] for line in rounds]
    measured = [line["measured"][name] for line in rounds]
    ratio = statistics.median(p / m for p, m in zip(predicted, measured, strict=True))
    return f"{statistics.median(predicted):,.4g} | {statistics.median(measured):,.4g} | {ratio:.3f}"


if __name__ == "__main__":
    main()
