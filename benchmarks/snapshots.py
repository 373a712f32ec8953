"""Weights kept on the way of a training run, and how good each of them is: for any trainer.

Evaluating during a run would have to stop the clock, and in an asynchronous run the searchers would
go on meanwhile. So a run only keeps its weights, at a fixed cadence of training time, and they are
evaluated when it is over, all by the same function on the same held-out queries.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from tba.config import Config
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.evaluation import answers
from tba.policy.loading import load_policy
from tba.tasks import load_task
from tba.tasks.scoring import Scorer

SAMPLES = 4
"""Responses a held-out query: four times as many halve the noise of a point."""


class Clock:
    """Seconds of training; begins when told to, and stands still in pauses."""

    def __init__(self) -> None:
        self._origin: float | None = None

    def start(self) -> None:
        """Begin at zero."""
        self._origin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start without the pauses; zero before it."""
        return 0.0 if self._origin is None else time.perf_counter() - self._origin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is done meanwhile."""
        before = time.perf_counter()
        yield
        assert self._origin is not None, "only a clock that runs can be paused"
        self._origin += time.perf_counter() - before


class Snapshots:
    """Keeps weights every so many seconds: `N.safetensors`, and a line each in `index.jsonl`."""

    def __init__(self, folder: Path, *, every_s: float, dtype: torch.dtype) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._every_s = every_s
        self._dtype = dtype
        self._kept = 0

    def due(self, seconds: float) -> bool:
        """Whether weights are to be kept at this time of training; at zero they are."""
        return seconds >= self._kept * self._every_s

    def keep(self, model: nn.Module, seconds: float, **facts: float) -> None:
        """Write the model's weights and what is said of this moment."""
        weights = {
            name: weight.detach().to(self._dtype).contiguous()
            for name, weight in model.named_parameters()
        }
        file = f"{self._kept:04d}.safetensors"
        safetensors.torch.save_file(weights, self._folder / file)
        line = {"file": file, "seconds": seconds, **facts}
        with (self._folder / "index.jsonl").open("a") as index:
            index.write(json.dumps(line) + "\n")
        self._kept = int(seconds // self._every_s) + 1


def grade(folder: Path, config: Config, model_folder: str) -> list[dict[str, Any]]:
    """Return the index of the snapshots, each line with the held-out `pass_at_1` of its weights.

    They are evaluated as searchers would hold them (`search.dtype`), with the same random numbers,
    `SAMPLES` responses a query.
    """
    dtype = getattr(torch, config.search.dtype)
    policy = load_policy(model_folder, config.model, device=torch.device("cpu"), dtype=dtype)
    task = load_task(config.task, policy.tokenizer)
    queries = task.test[: config.evaluation.queries]
    search = config.search
    engine = TorchEngine(policy.model, policy.eos_ids)
    lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    with Scorer(task.reward) as scorer:
        for line in lines:
            _load(safetensors.torch.load_file(folder / line["file"]), engine.weights())
            line["pass_at_1"] = answers(
                engine,
                scorer,
                queries=queries,
                tokenizer=policy.tokenizer,
                pass_threshold=task.pass_threshold,
                sampling=Sampling(SAMPLES, search.temperature, search.max_completion_length),
                queries_per_batch=config.evaluation.queries_per_batch,
                seed=config.seed,
            ).pass_at(1)
    return lines


def _load(weights: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in into.items():
            weight.copy_(weights[name])
