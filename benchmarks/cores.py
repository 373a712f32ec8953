"""Work in processes that are pinned to a core each: alone, and side by side."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import get_context
from transformers.utils.logging import disable_progress_bar

from tba.annotations import annotation_names
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.pace import Lane
from tba.policy.loading import load_policy
from tba.run.rollouts import encode
from tba.runtimes.lanes import SearchPlan, open_lane
from tba.sampling import draw_batch
from tba.searcher import Seat, Stores
from tba.sync import WeightStore
from tba.update import PolicyUpdate

GATE_S = 300.0
"""How long works wait for each other before and after; one that died is not waited for longer."""


def in_processes(target: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Do the jobs at the same time, each in a process; each sends one result."""
    context = get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in jobs]
    processes = [
        context.Process(target=target, args=(pipe[1], *job))
        for pipe, job in zip(pipes, jobs, strict=True)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that a process which ends without a result is noticed
    results = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return results


def pin(process: int, core: int) -> None:
    """Bind all threads of a process, and of the processes it has started, to one core."""
    for task in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})
        for child in (task / "children").read_text().split():
            pin(int(child), core)


def speeds_of(works: Sequence[tuple[str, int]], config: Config, seconds: float) -> list[float]:
    """Return turns a second of each kind of work, all done at the same time.

    Args:
        works: Names in `WORK`, and the core of each.
        config: What is searched and trained, with one thread, beginning with a policy's folder.
        seconds: For how long.
    """
    gate = get_context("spawn").Barrier(len(works), timeout=GATE_S)
    return in_processes(_do, [(kind, core, config, seconds, gate) for kind, core in works])


def _do(pipe: Any, kind: str, core: int, config: Config, seconds: float, gate: Any) -> None:
    """Do one kind of work for a while; send turns a second."""
    pin(os.getpid(), core)
    torch.set_num_threads(1)
    disable_progress_bar()
    with WORK[kind](config) as turn:
        for _ in range(3):
            turn()
        gate.wait()
        start, turns = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            turn()
            turns += 1
        speed = turns / (time.perf_counter() - start)
        gate.wait()  # nobody ends, and leaves the other alone, before both are done
    pipe.send(speed)


@contextmanager
def _loop(config: Config) -> Iterator[Callable[[], object]]:
    """Count, in plain Python: no memory to speak of."""
    del config
    yield lambda: sum(i & 1 for i in range(200_000))


@contextmanager
def _matmul(config: Config) -> Iterator[Callable[[], object]]:
    """Multiply matrices that fit into a core's own cache."""
    del config
    matrix = torch.ones(256, 256)
    yield lambda: [matrix @ matrix for _ in range(100)]


@contextmanager
def _search(config: Config) -> Iterator[Callable[[], object]]:
    """Search as a searcher does; nobody takes what it finds."""
    with _searching(config) as lane:
        yield lambda: lane.turn(0, 0)


@contextmanager
def _training(config: Config) -> Iterator[Callable[[], object]]:
    """Take steps as a trainer does, on what was found before."""
    model = config.model.model_name_or_path
    assert model is not None
    policy = load_policy(model, config.model, device=torch.device("cpu"), dtype=torch.float32)
    update = PolicyUpdate(policy.model, config, policy.eos_ids)
    buffer = ReplayBuffer(config.buffer.capacity_per_query, annotation_names(config.objective))
    with _searching(config) as lane:
        for _ in range(4):
            buffer.add(encode(lane.turn(0, 0) or []))
    generator = np.random.default_rng(0)

    def turn() -> None:
        batch = draw_batch(
            buffer,
            queries_per_batch=config.trainer.queries_per_batch,
            samples_per_query=config.trainer.samples_per_query,
            trainer_version=0,
            config=config.buffer,
            generator=generator,
        )
        assert batch is not None
        update.step(batch, 0)

    yield turn


WORK = {"loop": _loop, "matmul": _matmul, "search": _search, "training": _training}


@contextmanager
def _searching(config: Config) -> Iterator[Lane]:
    model = config.model.model_name_or_path
    assert model is not None
    policy = load_policy(model, config.model, device=torch.device("cpu"), dtype=torch.float32)
    store = WeightStore(dict(policy.model.named_parameters()), torch.float32)
    store.publish(dict(policy.model.named_parameters()), 0)
    store.flush()
    seat = Seat(0, announce=lambda stage: None, send=lambda batch: None)
    with open_lane(SearchPlan(config, model, Stores(store, None), 0), seat, 0, "cpu") as lane:
        yield lane
