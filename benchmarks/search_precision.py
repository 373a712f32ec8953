"""Search in eight bits: what the mismatch of its log-probabilities does to each objective.

    python -m benchmarks.search_precision --model models/smollm2 --out build/search_precision

Recipe `sums-smollm2`, with the searcher in bfloat16 or with eight-bit weights and inputs, under
trajectory balance, which needs no sampling log-probability, and under Dr. GRPO and PPO, whose loss
holds the ratio of the trainer's probability to the searcher's. Every run is one process and
one thread (runtime `inline`, mode `barrier`, k = 1: samples are one version old at each step, but
for the few that trajectory balance draws from the whole buffer), so time has no part in it and
runs may go side by side. A finished run is kept in `--out`/NAME.json and not done again.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.arguments import count, keep_to, names
from benchmarks.entrants import by_method, spread
from tba.api import let_idle_threads_sleep, train
from tba.runtimes.resources import available_cores

RECIPE = "sums-smollm2"
NEWEST = {"buffer.on_policy_prob": 1.0, "buffer.recent_versions": 1}
"""Queues of size one, for objectives that are not made for replay."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tb": {},
    "dr-grpo": {"objective": {"kind": "dr_grpo"}, **NEWEST},
    "ppo": {"objective": {"kind": "ppo"}, **NEWEST},
}
PRECISIONS = ("bfloat16", "int8")
LATE = 20
"""Last steps over which the searcher's accuracy is averaged."""


@dataclass(frozen=True)
class Job:
    """One run."""

    objective: str
    """A key of `OBJECTIVES`."""
    precision: str
    """One of `PRECISIONS`."""
    seed: int
    """Seed of search and draws."""

    @property
    def method(self) -> str:
        """Objective and precision."""
        return f"{self.objective}, {self.precision}"

    def file(self, out: Path) -> Path:
        """Return where its result is kept."""
        return out / f"{self.objective}-{self.precision}-{self.seed}.json"


def main() -> None:
    """Do the runs that have no result yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/search_precision"))
    parser.add_argument(
        "--objectives", type=names(OBJECTIVES, "objective"), default=list(OBJECTIVES)
    )
    parser.add_argument("--precisions", type=names(PRECISIONS, "precision"), default=PRECISIONS)
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--processes", type=count, default=available_cores())
    arguments = parser.parse_args()
    keep_to(parser, arguments, "model")
    let_idle_threads_sleep()
    jobs = [
        Job(objective, precision, seed)
        for seed in range(arguments.seeds)
        for objective in arguments.objectives
        for precision in arguments.precisions
    ]
    missing = [job for job in jobs if not job.file(arguments.out).is_file()]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(run, job, arguments) for job in missing]
        for done in as_completed(runs):
            print(done.result(), flush=True)
    files = sorted(arguments.out.glob("*-*.json"))
    print(table([json.loads(file.read_text()) for file in files]))


def run(job: Job, arguments: argparse.Namespace) -> str:
    """Do a run and keep what came of it; return that in a line."""
    torch.set_num_threads(1)
    disable_progress_bar()
    file = job.file(arguments.out)
    folder = file.with_suffix("")
    settings = {
        "model.model_name_or_path": str(arguments.model),
        "search.precision": job.precision,
        "runtime": {"kind": "inline"},
        "sync.mode": "barrier",
        "seed": job.seed,
        **OBJECTIVES[job.objective],
    }
    summary = train(RECIPE, run_dir=folder, clean=folder.exists(), progress=False, **settings)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "log_prob_mismatch" in row]
    assert summary.before is not None
    assert summary.after is not None
    result = {
        "method": job.method,
        "seed": job.seed,
        "steps": summary.steps,
        "before": dataclasses.asdict(summary.before),
        "after": dataclasses.asdict(summary.after),
        "first_mismatch": rows[0]["log_prob_mismatch"],
        "mismatch": statistics.fmean(row["log_prob_mismatch"] for row in rows),
        "late": statistics.fmean(row["pass_at_1"] for row in rows[-LATE:]),
        "staleness": summary.staleness.mean if summary.staleness else 0.0,
    }
    file.write_text(json.dumps(result, indent=1))
    after = summary.after
    return (
        f"{job.method}, seed {job.seed}: sampled {after.sampled_pass_at_1:.3f}, "
        f"greedy {after.greedy_pass_at_1:.3f}, {summary.seconds:.0f} s"
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown, a row an objective and precision."""
    lines = [
        "| objective, search | seeds | sampled pass@1 | greedy pass@1 | searcher's, last steps "
        "| mismatch of the first step, nats a token | mean mismatch | staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in by_method(found):
        cells = [
            spread(own, lambda result: result["after"]["sampled_pass_at_1"]),
            spread(own, lambda result: result["after"]["greedy_pass_at_1"]),
            spread(own, lambda result: result["late"]),
            spread(own, lambda result: result["first_mismatch"]),
            spread(own, lambda result: result["mismatch"]),
            spread(own, lambda result: result["staleness"]),
        ]
        lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
