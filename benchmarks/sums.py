"""Runs of the recipe `arithmetic` in one process, with whatever staleness is asked for.

Searcher, buffer, sampling, update and evaluation are those of the package; only the wire between
them is replaced: before each step the searcher is handed the weights of `staleness` steps ago (the
initial ones until then) and searches one batch with them. Time therefore has no part in it.

    source "constant"   the step learns from that batch alone, duplicates included
    source "buffer"     the batch goes to the replay buffer, from which the step draws
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from tba.actor_learner import batch_of
from tba.annotations import annotation_names
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.config.load import load_config
from tba.engines.torch_engine import TorchEngine
from tba.evaluation import evaluate
from tba.pace import Lane
from tba.policy.initial import initial_model
from tba.policy.loading import load_policy
from tba.records import Batch, EvalReport, Trajectory
from tba.run.rollouts import encode
from tba.runtimes.lanes import SearchPlan, open_lane
from tba.sampling import draw_batch
from tba.searcher import Seat, Stores, stream_seed
from tba.sync import WeightStore
from tba.tasks import load_task
from tba.tasks.scoring import Scorer
from tba.update import PolicyUpdate

SHARED = [
    "--trainer.queries_per_batch=32",
    "--search.queries_per_batch=32",
    '--trainer.learning_rate_schedule={kind = "linear", warmup_steps = 20}',
    "--evaluation.queries=1000",
]
"""What differs from the recipe in every run: half the batch, fewer steps."""

KL = '--objective.beta={kind = "linear", start = 0.3, end = 0.05}'
"""The recipe's schedule, for objectives that have one."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    overrides: tuple[str, ...]
    """Settings on top of the recipe's and of `SHARED`."""
    steps: int
    """Optimiser steps."""
    staleness: int
    """Age of the searcher's weights, in steps."""
    source: str
    """Where a step's samples come from: "constant" or "buffer"."""
    seed: int
    """Seed of search and draws; the initial policy is the same for all."""
    labels: tuple[tuple[str, Any], ...]
    """What the run is in the table."""

    @property
    def key(self) -> str:
        """A name by which a finished run is found again."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def initial_policy(folder: Path) -> Path:
    """Build and warm-start the policy with which every run begins, once."""
    config = load_config(["arithmetic"])
    return Path(initial_model(config, folder, torch.device("cpu"), print))


def run_all(jobs: Sequence[Job], out: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Do the jobs that `out`/runs.jsonl does not hold yet; return all results by key."""
    out.mkdir(parents=True, exist_ok=True)
    model = initial_policy(out / "model")
    log = out / "runs.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    results = {line["key"]: line for line in map(json.loads, lines)}
    missing = [job for job in dict.fromkeys(jobs) if job.key not in results]
    # Other than multiprocessing's own pool, this one ends when a process of it is killed.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(_run, job, str(model)) for job in missing]
        for number, run in enumerate(as_completed(runs), start=1):
            result = run.result()
            results[result["key"]] = result
            with log.open("a") as file:
                file.write(json.dumps(result) + "\n")
            words = " ".join(f"{name} {value}" for name, value in result["labels"])
            score = result["sampled_pass_at_1"]
            print(f"{number}/{len(missing)} {words}: {score:.3f}", flush=True)
    return results


def _run(job: Job, model: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    disable_progress_bar()
    report, bad_steps = train(job, model)
    return {
        "key": job.key,
        "labels": job.labels,
        "seed": job.seed,
        "sampled_pass_at_1": report.sampled_pass_at_1,
        "greedy_pass_at_1": report.greedy_pass_at_1,
        "bad_steps": bad_steps,
    }


def train(job: Job, model: str) -> tuple[EvalReport, int]:
    """Train as the job says; return what the policy can do and how many steps were skipped."""
    config = _config(job, model)
    policy = load_policy(model, config.model, device=torch.device("cpu"), dtype=torch.float32)
    update = PolicyUpdate(policy.model, config, policy.eos_ids)
    weights = dict(policy.model.named_parameters())
    store = WeightStore(weights, torch.float32)
    draw = _from_buffer(config) if job.source == "buffer" else _all_of_it
    history = deque([_copy(weights)], maxlen=job.staleness + 1)
    bad_steps = 0
    with _searching(config, model, store) as lane:
        for step in range(job.steps):
            store.publish(history[0], max(0, step - job.staleness))
            store.flush()
            found = lane.turn(0, 0)
            assert found
            bad_steps += update.step(draw(found, step), step).skipped
            history.append(_copy(weights))
    task = load_task(config.task, policy.tokenizer)
    with Scorer(task.reward) as scorer:
        report = evaluate(
            TorchEngine(policy.model, policy.eos_ids),
            scorer,
            task=task,
            tokenizer=policy.tokenizer,
            config=config.model_copy(update={"seed": 0}),  # the same questions for every seed
            policy_version=job.steps,
        )
    return report, bad_steps


def _config(job: Job, model: str) -> Config:
    own = [
        f"--trainer.steps={job.steps}",
        f"--seed={job.seed}",
        "--model.build=none",
        "--warm_start.steps=0",
        f"--model.model_name_or_path={model}",
    ]
    return load_config(["arithmetic"], [*SHARED, *own, *job.overrides])


@contextmanager
def _searching(config: Config, model: str, store: WeightStore) -> Iterator[Lane]:
    plan = SearchPlan(config, model, Stores(store, None), next_ticket=0)
    with open_lane(
        plan, Seat(0, announce=lambda stage: None, send=lambda batch: None), 0, "cpu"
    ) as lane:
        yield lane


def _copy(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


Draw = Callable[[list[Trajectory], int], Batch]


def _from_buffer(config: Config) -> Draw:
    buffer = ReplayBuffer(config.buffer.capacity_per_query, annotation_names(config.objective))

    def draw(found: list[Trajectory], step: int) -> Batch:
        buffer.add(encode(found))
        batch = draw_batch(
            buffer,
            queries_per_batch=config.trainer.queries_per_batch,
            samples_per_query=config.trainer.samples_per_query,
            trainer_version=step,
            config=config.buffer,
            generator=np.random.default_rng(stream_seed(config.seed, "draw", step)),
        )
        assert batch is not None
        return batch

    return draw


def _all_of_it(found: list[Trajectory], step: int) -> Batch:
    """Make a batch of a search batch as it is."""
    del step
    batch = batch_of(found)
    assert batch is not None
    return batch


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; the latter is NaN for a single value."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(np.mean(values)), float(error)
