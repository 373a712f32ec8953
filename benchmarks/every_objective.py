"""Every objective trains the recipe `arithmetic` end to end in the asynchronous runtime.

    python -m benchmarks.every_objective --out build/every_objective

Trainer and searcher are processes of their own, as in the recipe: nobody waits, and the searcher
takes new weights whenever there are any. All objectives begin with the same warm-started policy and
take the same number of steps with the settings of their sections, except for the KL schedule of the
recipe (`SCHEDULED`) and what `SETTINGS` lists. This shows that each works, not which is
best: rates are not tuned, and staleness is what this machine makes of it (`benchmarks.staleness`
fixes it). Runs are kept in `--out`/runs.jsonl, and a second call goes on where the first one ended.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tba
from benchmarks.sums import KL, SHARED, initial_policy
from tba.config.load import load_config
from tba.objectives import OBJECTIVES

SCHEDULED = (
    *("tb", "tb_prime", "tb_tapered", "tb_learned_z", "subtb", "f_tb", "dro"),
    *("reinforce", "rloo", "rloo_proximal", "ppo", "vtrace", "a3c"),
)
"""Objectives whose beta is the strength of the KL term, as in the recipe's own."""
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "vineppo": ("--objective.step_separator=", "--objective.rollouts_per_prefix=3"),
}
"""A response to a sum is a single line, so each of its tokens is a step."""


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/every_objective"))
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = initial_policy(arguments.out / "model")
    log = arguments.out / "runs.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    results = {(run["objective"], run["steps"], run["rate"]): run for run in done}
    kinds = arguments.objectives.split(",")
    for kind in kinds:
        key = (kind, arguments.steps, arguments.rate)
        if key not in results:
            results[key] = train(*key, model)
            with log.open("a") as file:
                file.write(json.dumps(results[key]) + "\n")
    rows = [results[kind, arguments.steps, arguments.rate] for kind in kinds]
    page = "\n".join(lines(rows))
    (arguments.out / "table.md").write_text(page + "\n")
    print(page)


def train(kind: str, steps: int, rate: float, model: Path) -> dict[str, Any]:
    """Train with one objective; return what the run came to."""
    own = (
        f"--objective.kind={kind}",
        *((KL,) if kind in SCHEDULED else ()),
        *SETTINGS.get(kind, ()),
        f"--trainer.steps={steps}",
        f"--trainer.learning_rate={rate}",
        "--model.build=none",
        "--warm_start.steps=0",
        f"--model.model_name_or_path={model}",
        "--checkpoint.every=0",
    )
    config = load_config(["arithmetic"], [*SHARED, *own])
    with TemporaryDirectory() as folder:
        summary = tba.train(config, run_dir=Path(folder) / "run", progress=False)
    assert summary.before
    assert summary.after
    assert summary.staleness
    found = {
        "objective": kind,
        "steps": summary.steps,
        "rate": rate,
        "before": summary.before.sampled_pass_at_1,
        "after": summary.after.sampled_pass_at_1,
        "greedy_before": summary.before.greedy_pass_at_1,
        "greedy_after": summary.after.greedy_pass_at_1,
        "staleness_mean": summary.staleness.mean,
        "staleness_max": summary.staleness.max,
        "trainer_idle_share": summary.trainer_idle_share,
        "bad_steps": summary.bad_steps,
        "seconds": summary.seconds,
    }
    print(json.dumps(found), flush=True)
    return found


def lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield the table as Markdown."""
    yield (
        "| objective | sampled before | after | greedy before | after | staleness, mean (max) "
        "| trainer idle | seconds |"
    )
    yield "|---" * 8 + "|"
    for row in rows:
        yield (
            f"| {row['objective']} | {row['before']:.3f} | {row['after']:.3f} "
            f"| {row['greedy_before']:.3f} | {row['greedy_after']:.3f} "
            f"| {row['staleness_mean']:.1f} ({row['staleness_max']}) "
            f"| {row['trainer_idle_share']:.1%} | {row['seconds']:.0f} |"
        )


if __name__ == "__main__":
    main()
