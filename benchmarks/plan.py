"""What `tba plan` predicts against what runs do: recipe `arithmetic`, 1 to 4 local searchers.

    python -m benchmarks.plan --out build/plan

measures a profile, predicts, then trains for `--steps` steps with each number of searchers, all
from one warm-started policy. Counted is from step `--from-step` on. Writes the table and, with
searchers on machines of their own, the curve from 1 to 1,024 of them.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import tba
from tba.api import let_idle_threads_sleep
from tba.config import Config
from tba.config.load import load_config
from tba.plan.planning import Point, plan
from tba.plan.profile import Profile
from tba.plan.report import draw_picture
from tba.plan.simulation import Setup
from tba.policy.initial import initial_model

SEARCHERS = (1, 2, 3, 4)
MANY = tuple(2**power for power in range(11))


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
    parser.add_argument("--profile", type=Path, help="a profile to use instead of measuring one")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--from-step", type=int, default=50)
    parser.add_argument("--searchers", default=",".join(map(str, SEARCHERS)))
    arguments = parser.parse_args()
    let_idle_threads_sleep()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    counts = [int(word) for word in arguments.searchers.split(",")]
    config = _config(out, arguments.steps)
    profile = _profile(config, arguments.profile, out / "profile.json")
    counted = arguments.steps - arguments.from_step
    setup = Setup(searchers=1, warm_up=arguments.from_step, steps=counted)
    points = plan(profile, config, setup, counts).points
    seen = {n: _measure(config, n, out / f"run-{n}", arguments.from_step) for n in counts}
    page = "\n".join(_lines(points, seen))
    (out / "table.md").write_text(page + "\n")
    print(page)
    curve = plan(profile, config, Setup(searchers=1, apart=True), MANY)
    curve.write(out / "curve.json")
    if not draw_picture(curve, out / "curve.png"):
        print("no plot: matplotlib is not installed")


def _config(out: Path, steps: int) -> Config:
    model = initial_model(load_config(["arithmetic"]), out / "model", torch.device("cpu"), print)
    own = ["--model.build=none", "--warm_start.steps=0", f"--model.model_name_or_path={model}"]
    short = [f"--trainer.steps={steps}", "--evaluation.queries=64", "--checkpoint.every=0"]
    return load_config(["arithmetic"], [*own, *short])


def _profile(config: Config, given: Path | None, file: Path) -> Profile:
    if given is not None:
        return Profile.read(given)
    from tba.plan.measure import measure

    profile = measure(config, lambda text: print(text, flush=True))
    profile.write(file)
    return profile


def _measure(config: Config, searchers: int, folder: Path, from_step: int) -> Seen:
    """Train with so many searchers."""
    search = config.search.model_copy(update={"searchers": searchers})
    own = config.model_copy(update={"search": search})
    tba.train(own, run_dir=folder, clean=folder.exists(), progress=False)
    texts = (folder / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, texts) if "loss" in line]
    first, last = lines[from_step - 1], lines[-1]
    seconds = last["time"] - first["time"]
    counted = lines[from_step:]
    # the rate is that since the initial fill, which the first line ends
    tokens = [
        line["search_tokens_per_s"] * (line["time"] - lines[0]["time"]) for line in (first, last)
    ]
    return Seen(
        steps_per_s=len(counted) / seconds,
        searched_per_s=(tokens[1] - tokens[0]) / seconds / _mean_length(folder),
        tokens_per_step=sum(line["tokens_trained"] for line in counted) / len(counted),
        staleness_mean=sum(line["staleness_mean"] for line in counted) / len(counted),
    )


def _mean_length(folder: Path) -> float:
    """Return the mean length of the run's responses, in tokens."""
    from tba.run.rollouts import RolloutLog

    with RolloutLog(folder / "rollouts.arrows") as log:
        lengths = [len(tokens) for batch in log.read() for tokens in batch.column("tokens")]
    return sum(lengths) / len(lengths)


def _lines(points: list[Point], seen: dict[int, Seen]) -> Iterator[str]:
    """Yield the table as Markdown: predicted, measured, ratio of each figure."""
    names = {
        "steps_per_s": "steps/s",
        "searched_per_s": "trajectories/s",
        "tokens_per_step": "tokens a step",
        "staleness_mean": "staleness",
    }
    heads = [f"{name}: predicted | measured | ratio" for name in names.values()]
    yield "| searchers | " + " | ".join(heads) + " |"
    yield "|---" * (1 + 3 * len(names)) + "|"
    for point in points:
        predicted = dataclasses.asdict(_predicted(point))
        measured = dataclasses.asdict(seen[point.searchers])
        cells = (
            f"{predicted[n]:,.4g} | {measured[n]:,.4g} | {predicted[n] / measured[n]:.3f}"
            for n in names
        )
        yield f"| {point.searchers} | " + " | ".join(cells) + " |"


def _predicted(point: Point) -> Seen:
    return Seen(
        steps_per_s=point.steps_per_s,
        searched_per_s=point.searched_per_s,
        tokens_per_step=point.trained_tokens_per_s / point.steps_per_s,
        staleness_mean=point.staleness_mean,
    )


if __name__ == "__main__":
    main()
