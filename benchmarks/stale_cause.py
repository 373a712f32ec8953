"""Why plain TB suffers from stale samples where TBA' does not: one half of its update at a time.

    python -m benchmarks.stale_cause --out build/stale_cause

The update of TB is a sum over samples of A grad log pi: towards those with A > 0, away from those
with A < 0. TBA' weights every token with min(pi / mu, 8), which is near 0 where the policy has left
what the sampling policy did. Here the weight is given to none of the samples (plain TB), to those
that are pushed away, to those that are drawn near, or to both, in the world of
`benchmarks.staleness` at 64 steps of staleness.
"""

import argparse
from pathlib import Path

from torch import Tensor

from benchmarks.sums import Job, run_all
from tba.objectives import ObjectiveOutput

SIDES = {"none": (0, 0), "away": (1, 0), "near": (0, 1), "both": (1, 1)}
"""Whether the ratio is on what is pushed away, and on what is drawn near."""
RATES = (1e-4, 3e-4)
STALENESS = 64
CAP = 8.0


def damped(
    log_pi: Tensor,
    log_mu: Tensor,
    log_ref: Tensor,
    mask: Tensor,
    reward: Tensor,
    progress: float,
    *,
    away: float,
    near: float,
) -> ObjectiveOutput:
    """Return TB's update with the token ratio on a side of it or both; beta falls from .3 to .05.

    Args:
        log_pi: Log-probabilities under the policy; [query, sample, token].
        log_mu: The same under the policy that sampled.
        log_ref: The same under the reference.
        mask: True at response tokens.
        reward: Raw rewards; [query, sample].
        progress: Share of the steps that are done.
        away: 1 puts the ratio on samples of negative advantage.
        near: 1 puts it on those of positive advantage.
    """
    beta = 0.3 - 0.25 * progress
    kl = (log_pi.detach() - log_ref).where(mask, 0.0).sum(-1)  # [query, sample]
    score = reward - beta * kl
    advantage = score - score.mean(1, keepdim=True)
    ratio = (log_pi.detach() - log_mu).where(mask, 0.0).exp().clamp(max=CAP)
    weighted = ((advantage < 0) & bool(away)) | ((advantage > 0) & bool(near))
    weight = ratio.where(weighted.unsqueeze(-1), 1.0)
    surrogate = (weight * log_pi.where(mask, 0.0)).sum(-1)
    return ObjectiveOutput(loss=-(advantage * surrogate).mean(), metrics={})


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/stale_cause"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    cells = {
        (side, rate): [job(side, rate, seed, arguments.steps) for seed in range(arguments.seeds)]
        for side in SIDES
        for rate in RATES
    }
    jobs = [job for jobs in cells.values() for job in jobs]
    results = run_all(jobs, arguments.out, arguments.processes)
    print("| ratio on the samples | " + " | ".join(f"rate {rate:g}" for rate in RATES) + " |")
    print("|---" * (len(RATES) + 1) + "|")
    for side in SIDES:
        scores = [
            ", ".join(f"{results[j.key]['sampled_pass_at_1']:.3f}" for j in cells[side, rate])
            for rate in RATES
        ]
        print(f"| {side} | " + " | ".join(scores) + " |")


def job(side: str, rate: float, seed: int, steps: int) -> Job:
    """Describe one run."""
    away, near = SIDES[side]
    return Job(
        overrides=(
            "--objective.kind=custom",
            "--objective.function=benchmarks/stale_cause.py:damped",
            f"--objective.settings={{away = {away}, near = {near}}}",
            f"--trainer.learning_rate={rate}",
        ),
        steps=steps,
        staleness=STALENESS,
        source="constant",
        seed=seed,
        labels=(("ratio on", side), ("rate", rate), ("seed", seed)),
    )


if __name__ == "__main__":
    main()
