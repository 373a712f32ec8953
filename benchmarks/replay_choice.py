"""Which samples to replay: m and the other branch's choice, at two search budgets.

    python -m benchmarks.replay_choice --out build/replay_choice

TB on the recipe `arithmetic` with 512 training queries, so that each is asked again and again and
the buffer holds up to 100 responses of it. Every step learns from 32 queries with K = 8 samples;
the searcher, 2 steps behind, finds 8 responses to 32 queries a step (budget 1) or to 8 (1/4).
With probability m a query of the batch is one of the newest sync, otherwise any, with its K samples
drawn uniformly or by softmax of the reward (temperature .2). Same policy at the start, same number
of steps; held-out queries are never trained on.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.sums import KL, Job, mean_and_error, run_all

SHARES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
CHOICES = ("uniform", "softmax_reward")
BUDGETS = {"1": 32, "1/4": 8}  # queries searched a step


def main() -> None:
    """Run what is missing, then print and draw the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/replay_choice"))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    cells = {
        (budget, choice, m): [
            job(budget, choice, m, seed, arguments.steps) for seed in range(arguments.seeds)
        ]
        for budget in BUDGETS
        for choice in CHOICES
        for m in SHARES
    }
    results = run_all(
        [j for jobs in cells.values() for j in jobs], arguments.out, arguments.processes
    )
    table = {
        cell: mean_and_error([results[j.key]["sampled_pass_at_1"] for j in jobs])
        for cell, jobs in cells.items()
    }
    page = "\n".join(lines(table))
    (arguments.out / "table.md").write_text(page + "\n")
    print(page)
    draw(table, arguments.out / "replay_choice.png")


def job(budget: str, choice: str, m: float, seed: int, steps: int) -> Job:
    """Describe one run; at m = 1 nothing is left to choose."""
    chosen = "uniform" if m == 1.0 else choice
    return Job(
        overrides=(
            "--objective.kind=tb",
            KL,
            "--task.train_queries=512",
            f"--search.queries_per_batch={BUDGETS[budget]}",
            f"--buffer.on_policy_prob={m}",
            f"--buffer.off_policy_sampling={chosen}",
            "--buffer.reward_temperature=0.2",
            "--trainer.learning_rate=3e-4",
        ),
        steps=steps,
        staleness=2,
        source="buffer",
        seed=seed,
        labels=(("budget", budget), ("choice", chosen), ("m", m), ("seed", seed)),
    )


def lines(table: dict[tuple[str, str, float], tuple[float, float]]) -> Iterable[str]:
    """Yield the table as Markdown."""
    yield "| budget | other branch | " + " | ".join(f"m = {m:g}" for m in SHARES) + " |"
    yield "|---" * (len(SHARES) + 2) + "|"
    for budget in BUDGETS:
        for choice in CHOICES:
            cells = (table[budget, choice, m] for m in SHARES)
            words = " | ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in cells)
            yield f"| {budget} | {choice} | {words} |"


def draw(table: dict[tuple[str, str, float], tuple[float, float]], file: Path) -> None:
    """Plot pass@1 over m for each budget and choice, if matplotlib is there."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(1, len(BUDGETS), figsize=(9, 4), sharey=True)
    for panel, budget in zip(axes, BUDGETS, strict=True):
        for choice in CHOICES:
            means, errors = zip(*(table[budget, choice, m] for m in SHARES), strict=True)
            panel.errorbar(SHARES, means, yerr=errors, label=choice, marker="o", capsize=2)
        panel.set_title(f"search budget {budget}")
        panel.set_xlabel("m: share of queries of the newest sync")
    axes[0].set_ylabel("held-out sampled pass@1")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
