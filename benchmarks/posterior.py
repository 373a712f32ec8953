r"""Which objectives find the posterior, from whose samples: a proof by enumeration.

    python -m benchmarks.posterior --objectives tb,grpo --out build/posterior

The optimum of the KL-regularised objective is pi*(y|x) = ref(y|x) exp(r(y;x) / beta) / Z(x),
equation (2) of `docs/algorithm.md`. Here a language is so small that pi* can be written down: four
words and an end, at most five tokens (cut there without an end), 1365 responses. A world is 8
queries, each with a reference (logits N(0, 1) after each of 341 prefixes) and a reward for each
response (N(0, 1)); beta is 1. Each seed has its own world. The policy is a table of logits, so it
can represent pi* exactly, and starts at the reference; what else an objective learns (log Z of each
query, the value of each prefix) is a table of zeros.

Every step draws 16 responses a query from one of these sources:

    on-policy   the policy itself
    stale 4     the policy as it was 4 steps ago; 16 and 64 likewise; the reference until then
    buffer      the policy adds 16 responses of each query; with probability m = 1/2, drawn for each
                query, these are used, otherwise 16 of all that were added to the query so far,
                uniformly
    uniform     each token uniform, the end included

Samples are drawn with replacement, and duplicates are kept: this is about the objective, not about
the buffer's merging. The inputs that an objective names are exact: log-probabilities of the policy
that sampled, advantages of each token under it, log Z, rewards of responses that end early. The
anchor (`log_old`) is a copy of the policy, renewed every 8 steps.

All objectives take Adam steps of one size, which falls linearly to zero. Their settings are the
defaults of their sections, except that beta is 1 wherever it is the strength of the KL term to the
reference, so that they aim at the same posterior. An objective without such a term, or with another
one, aims elsewhere, and the distance says how far.

Seeds, sources and queries are rows of the same tensors, and each row has its own tables. Where an
objective depends on the whole batch (a preparation, or the mean reward), the batch is the 8 queries
of one seed and source, and the loss is computed batch by batch.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from benchmarks.sources import (
    BETA,
    QUERIES,
    SOURCES,
    TREE,
    Draws,
    Paths,
    Sampler,
    World,
    by_source,
    make_world,
)
from benchmarks.tree import at_states, at_tokens, log_probs_of
from tba.config.objectives import ConstantBeta, section_of
from tba.objectives import OBJECTIVES
from tba.objectives.base import Objective, declared

OTHER_BETAS = ("gvpo",)  # the pull to the policy that sampled
ANCHOR_EVERY = 8
STEPS = 4000
PEAK_RATE = 0.04
BETAS = (0.9, 0.99)
EPSILON = 1e-12  # gradients of rare prefixes are small, and shall count in full
Cell = dict[str, float | None]  # "mean" and "standard_error"
Summary = dict[str, dict[str, Cell]]  # by metric and source
METRICS = {
    "total_variation": "total variation to the posterior",
    "kl": "KL(policy || posterior), nats",
    "reward": "mean reward",
    "entropy": "entropy, nats",
}


class Learner:
    """The tables of all rows, and the inputs of an objective from them."""

    def __init__(self, world: World, paths: Paths) -> None:
        self._world, self._paths = world, paths
        self.logits = world.log_ref.clone().requires_grad_()
        self._value = torch.zeros_like(world.log_ref[..., :1]).requires_grad_()
        self._log_z = torch.zeros(world.log_ref.shape[0]).requires_grad_()
        self._anchor = world.log_ref.clone()
        self.tables = {"log_pi": self.logits, "value": self._value, "log_z": self._log_z}

    def renew_anchor(self) -> None:
        """Copy the policy to the anchor."""
        self._anchor.copy_(self.logits.detach())

    def inputs(self, names: Sequence[str], draws: Draws, progress: float) -> dict[str, object]:
        """Return the inputs of these names, as `tba.objectives.base.INPUTS` describes them."""
        world = self._world
        state, token, mask = self._paths.of(draws.response)
        reward = world.reward.gather(1, draws.response)
        log_probs = log_probs_of(at_states(self.logits, state))
        found: Mapping[str, Callable[[], object]] = {
            "log_pi": lambda: at_tokens(log_probs, token),
            "mask": lambda: mask,
            "reward": lambda: reward,
            "finished": lambda: draws.response < TREE.states,
            "log_ref": lambda: at_tokens(at_states(world.log_ref, state), token),
            "log_mu": lambda: draws.log_mu,
            "log_old": lambda: at_tokens(log_probs_of(at_states(self._anchor, state)), token),
            "value": lambda: at_states(self._value, state).squeeze(-1),
            "log_z": lambda: self._log_z,
            "log_stop": lambda: log_probs[..., TREE.words],
            "log_ref_stop": lambda: at_states(world.log_ref, state)[..., TREE.words],
            "prefix_reward": lambda: at_states(world.reward.unsqueeze(-1), state).squeeze(-1),
            "step_advantage": lambda: draws.step_advantage,
            "log_z_star": lambda: world.log_z.float().unsqueeze(1).expand_as(reward),
            "mean_reward": reward.mean,  # these two are replaced by those of each batch
            "mean_tokens": lambda: _mean_tokens(mask),
            "max_tokens": lambda: TREE.depth,
            "progress": lambda: progress,
        }
        return {name: found[name]() for name in names}


def _mean_tokens(mask: Tensor) -> float:
    return float(mask.sum(-1).float().mean())


@dataclass(frozen=True, slots=True)
class Method:
    """An objective with its settings."""

    objective: Objective
    """The loss and its preparation."""
    settings: Mapping[str, object]
    """Of the loss."""
    settings_of_preparation: Mapping[str, object]
    """Of the preparation."""

    def names(self) -> tuple[str, ...]:
        """Return every input that is needed."""
        return tuple(
            dict.fromkeys((*self.objective.inputs(), *self.objective.inputs_of_preparation()))
        )

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the sum of the losses of all batches."""
        whole = {"mean_reward", "mean_tokens"} & inputs.keys()
        if self.objective.prepare is None and not whole:
            return self._loss_of_batch(inputs)
        rows = next(value.shape[0] for value in inputs.values() if is_of_rows(value))
        losses = []
        for first in range(0, rows, QUERIES):
            batch = {
                name: value[first : first + QUERIES] if is_of_rows(value) else value
                for name, value in inputs.items()
            }
            if "mean_reward" in batch:
                batch["mean_reward"] = batch["reward"].mean()
            if "mean_tokens" in batch:
                batch["mean_tokens"] = _mean_tokens(batch["mask"])
            losses.append(self._loss_of_batch(batch))
        return torch.stack(losses).sum()

    def _loss_of_batch(self, inputs: Mapping[str, Any]) -> Tensor:
        prepared: Mapping[str, Tensor] = {}
        if self.objective.prepare is not None:
            with torch.no_grad():
                prepared = self.objective.prepare(
                    **{name: inputs[name] for name in self.objective.inputs_of_preparation()},
                    **self.settings_of_preparation,
                )
        given = {name: inputs[name] for name in self.objective.inputs()}
        return self.objective.loss(**given, **prepared, **self.settings).loss


def is_of_rows(value: object) -> TypeGuard[Tensor]:
    """Tell whether an input has a leading axis of rows."""
    return isinstance(value, Tensor) and value.dim() > 0


def method_of(kind: str) -> Method:
    """Return an objective with the defaults of its section, but for the beta of this benchmark."""
    section, objective = section_of(kind)(), OBJECTIVES[kind]

    def value(name: str) -> object:
        default = getattr(section, name)
        if name == "beta" and kind not in OTHER_BETAS:
            return BETA
        return default.value if isinstance(default, ConstantBeta) else default

    def settings(function: Callable[..., object] | None) -> dict[str, object]:
        return {name: value(name) for name in declared(function)[1]} if function else {}

    return Method(objective, settings(objective.loss), settings(objective.prepare))


def train(kind: str, world: World, seeds: int, steps: int) -> Tensor:
    """Return the logits that an objective ends with, in every row."""
    method, paths = method_of(kind), Paths()
    names = method.names()
    learner = Learner(world, paths)
    sampler = Sampler(world, paths, seeds, steps, advantages="step_advantage" in names)
    tables = [table for name, table in learner.tables.items() if name in names]
    adam = torch.optim.Adam(tables, lr=PEAK_RATE, betas=BETAS, eps=EPSILON, fused=True)
    for step in range(steps):
        if step % ANCHOR_EVERY == 0:
            learner.renew_anchor()
        draws = sampler.draw(step, learner.logits.detach())
        for group in adam.param_groups:
            group["lr"] = PEAK_RATE * (1 - step / steps)
        adam.zero_grad()
        method.loss(learner.inputs(names, draws, step / steps)).backward()
        adam.step()
    return learner.logits.detach()


def measure(log_pi: Tensor, world: World, seeds: int) -> dict[str, Tensor]:
    """Return each of `METRICS` as [seed, source], the mean over queries.

    Args:
        log_pi: Of every response, [row, response].
        world: The rows.
        seeds: Number of them.
    """
    pi = log_pi.exp()
    of_rows = {
        "total_variation": (pi - world.log_posterior.exp()).abs().sum(dim=1) / 2,
        "kl": (pi * (log_pi - world.log_posterior)).sum(dim=1),
        "reward": (pi * world.reward).sum(dim=1),
        "entropy": -(pi * log_pi).sum(dim=1),
    }
    return {name: by_source(rows, seeds).mean(dim=2) for name, rows in of_rows.items()}


def summary(measured: Mapping[str, Tensor]) -> Summary:
    """Return metric -> source -> mean and standard error over seeds; None if there is none."""

    def cell(values: Tensor) -> Cell:
        error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None
        return {
            "mean": values.mean().item() if values.isfinite().all() else None,
            "standard_error": error if error is not None and math.isfinite(error) else None,
        }

    return {
        name: {source: cell(values[:, i]) for i, source in enumerate(SOURCES)}
        for name, values in measured.items()
    }


def markdown(results: Mapping[str, Summary]) -> str:
    """Return a table for each metric: a row for each objective, a column for each source."""

    def text(cell: Cell) -> str:
        mean, error = cell["mean"], cell["standard_error"]
        if mean is None:
            return "not finite"
        return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"

    lines = []
    for metric, title in METRICS.items():
        lines += [f"**{title}**", "", f"| objective | {' | '.join(SOURCES)} |"]
        lines.append("|---" * (len(SOURCES) + 1) + "|")
        for name, found in results.items():
            cells = " | ".join(text(found[metric][source]) for source in SOURCES)
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def plot(results: Mapping[str, Summary], file: Path) -> None:
    """Draw total variation as a map of objectives and sources, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install tba[report])", file=sys.stderr)
        return
    table = [
        [found["total_variation"][source]["mean"] for source in SOURCES]
        for found in results.values()
    ]
    values = [[math.nan if mean is None else mean for mean in row] for row in table]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis_r", aspect="auto")
    axes.set_xticks(range(len(SOURCES)), SOURCES)
    axes.set_yticks(range(len(results)), list(results))
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            color = "white" if value > 0.5 else "black"
            axes.text(x, y, f"{value:.3f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, label=METRICS["total_variation"])
    figure.savefig(file, dpi=150)


def earlier_results(out: Path | None, settings: Mapping[str, object]) -> dict[str, Summary]:
    """Return what an earlier call with the same settings left in its folder."""
    if out is None or not (out / "posterior.json").exists():
        return {}
    earlier = json.loads((out / "posterior.json").read_text())
    return earlier["results"] if earlier["settings"] == settings else {}


def main() -> None:
    """Train every objective in every row; print the tables, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objectives", default=",".join(OBJECTIVES), help="kinds, by commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    parser.add_argument("--seeds", type=int, default=5, help="number of worlds of 8 queries")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for posterior.json and posterior.png; a second call goes on from there",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = make_world(given.seeds)
    log_ref = TREE.response_log_probs(world.log_ref.double())
    settings = {"steps": given.steps, "seeds": given.seeds, "beta": BETA}
    results = {
        "(the reference)": summary(measure(log_ref, world, given.seeds)),
        "(the posterior)": summary(measure(world.log_posterior, world, given.seeds)),
        **earlier_results(given.out, settings),
    }
    for kind in given.objectives.split(","):
        if kind in results:
            continue
        started = time.process_time()
        logits = train(kind, world, given.seeds, given.steps)
        log_pi = TREE.response_log_probs(log_probs_of(logits.double()))
        results[kind] = summary(measure(log_pi, world, given.seeds))
        print(f"{kind}: {time.process_time() - started:.0f} s of processor", file=sys.stderr)
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"settings": settings, "results": results}, indent=2)
            (given.out / "posterior.json").write_text(text + "\n")
    print(markdown(results))
    if given.out is not None:
        plot(results, given.out / "posterior.png")


if __name__ == "__main__":
    main()
