"""What staleness does to each objective: held-out pass@1 on the recipe `arithmetic`.

    python -m benchmarks.staleness --out build/staleness

Every objective takes the same number of steps from the same warm-started policy, on samples that
are exactly 1, 4, 16 or 64 steps old, or from the recipe's replay buffer (m = .95) filled by a
searcher that is 2 steps behind. Each cell is the best of three peak learning rates, chosen on
seed 0 and then run with further seeds, so the first of the seeds is a little flattered. Runs are
kept in `--out`/runs.jsonl, and a second call goes on where the first one ended.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sums import KL, Job, mean_and_error, run_all

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "tb": (KL,),
    "tb_prime": (KL,),
    "tb_tapered": (KL,),
    "rloo": (KL,),
    "ppo": (KL,),
    "online_dpo": (),
    "grpo": (),
    "dr_grpo": (),
    "cispo": (),
    "tis": (),
}
"""Settings of each objective; without any, the defaults of its section."""
SOURCES: dict[str, tuple[str, int]] = {
    "1": ("constant", 1),
    "4": ("constant", 4),
    "16": ("constant", 16),
    "64": ("constant", 64),
    "buffer": ("buffer", 2),
}
RATES = (3e-5, 1e-4, 3e-4)


def main() -> None:
    """Run what is missing, then print and draw the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/staleness"))
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    kinds = arguments.objectives.split(",")
    first = [job(k, s, r, 0, arguments.steps) for k in kinds for s in SOURCES for r in RATES]
    results = run_all(first, arguments.out, arguments.processes)
    best = {
        (kind, source): max(
            RATES, key=lambda r: score(results, job(kind, source, r, 0, arguments.steps))
        )
        for kind in kinds
        for source in SOURCES
    }
    cells = {
        cell: [job(*cell, rate, seed, arguments.steps) for seed in range(arguments.seeds)]
        for cell, rate in best.items()
    }
    results = run_all(
        [j for jobs in cells.values() for j in jobs], arguments.out, arguments.processes
    )
    table = {
        cell: (*mean_and_error([score(results, j) for j in jobs]), best[cell])
        for cell, jobs in cells.items()
    }
    page = "\n".join(lines(kinds, table))
    (arguments.out / "table.md").write_text(page + "\n")
    print(page)
    draw(kinds, table, arguments.out / "staleness.png")


def job(kind: str, source: str, rate: float, seed: int, steps: int) -> Job:
    """Describe one run."""
    name, staleness = SOURCES[source]
    return Job(
        overrides=(
            f"--objective.kind={kind}",
            *OBJECTIVES.get(kind, ()),
            f"--trainer.learning_rate={rate}",
        ),
        steps=steps,
        staleness=staleness,
        source=name,
        seed=seed,
        labels=(("objective", kind), ("staleness", source), ("rate", rate), ("seed", seed)),
    )


def score(results: dict[str, dict[str, Any]], wanted: Job) -> float:
    """Return a run's held-out sampled pass@1."""
    return float(results[wanted.key]["sampled_pass_at_1"])


def lines(
    kinds: Sequence[str], table: dict[tuple[str, str], tuple[float, float, float]]
) -> Iterable[str]:
    """Yield the table as Markdown."""
    yield "| objective | " + " | ".join(SOURCES) + " |"
    yield "|---" * (len(SOURCES) + 1) + "|"
    for kind in kinds:
        cells = (table[kind, source] for source in SOURCES)
        words = (f"{mean:.3f} ± {error:.3f} ({rate:g})" for mean, error, rate in cells)
        yield f"| {kind} | " + " | ".join(words) + " |"


def draw(
    kinds: Sequence[str], table: dict[tuple[str, str], tuple[float, float, float]], file: Path
) -> None:
    """Plot pass@1 over staleness, if matplotlib is there."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    for at, kind in enumerate(kinds):
        style = {"marker": "o", "capsize": 2, "color": f"C{at}"}
        line = {"linewidth": 2.5} if kind.startswith("tb") else {"linestyle": "--"}
        shift = 0.02 * (at - len(kinds) / 2)
        means, errors, _ = zip(*(table[kind, source] for source in SOURCES), strict=True)
        places = [place + shift for place in range(len(SOURCES))]
        axes.errorbar(places[:-1], means[:-1], yerr=errors[:-1], label=kind, **style, **line)
        axes.errorbar(places[-1:], means[-1:], yerr=errors[-1:], **style)  # no amount of staleness
    axes.set_xticks(range(len(SOURCES)), [*SOURCES])
    axes.set_xlabel("staleness of the samples, steps")
    axes.set_ylabel("held-out sampled pass@1")
    axes.legend(ncols=3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
