"""Measures what a run's parts cost here: its own searcher, trainer, buffer and wires, briefly.

searching    batches as configured, with half the samples, with half the length
training     steps as configured, with half the queries; the rate is 0, so nothing is learnt
wires        weights published, hashed, pulled; trajectories logged and put into the buffer
contention   a searcher's process and the trainer: each alone, then both at once, by turns
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console

from tba.annotations import annotation_names
from tba.buffer import ReplayBuffer
from tba.config import Config, LocalRuntimeConfig
from tba.errors import ConfigError
from tba.objectives import load_objective
from tba.pace import Arrivals, Intake
from tba.plan.contention import measure_contention
from tba.plan.probe import Searched, SearchProbe
from tba.plan.profile import Measured, Profile, Responses, fit
from tba.plan.timing import LEAST, own_s, repeated
from tba.policy.adapters import load_trainable
from tba.policy.initial import initial_model
from tba.records import Batch
from tba.run.ledger import Ledger
from tba.run.metrics import MetricsWriter
from tba.run.progress import Progress
from tba.run.rollouts import RolloutLog
from tba.run.summary import Totals
from tba.runtimes.base import SearchStatus
from tba.runtimes.lanes import SearchPlan
from tba.runtimes.resources import (
    available_cores,
    check_devices,
    pick_device,
    searcher_threads,
    trainer_threads,
)
from tba.searcher import Stores
from tba.sync import WeightStore
from tba.tasks import task_of
from tba.trainer import Trainer
from tba.update import PolicyUpdate

NEVER = 10**9
"""Steps between two syncs of a trainer that shall not publish."""
ROUNDS = 2
"""How often what is compared is measured, by turns, so that a drift of the machine touches all."""

Tell = Callable[[str], None]
T = TypeVar("T")


def measure(config: Config, tell: Tell) -> Profile:
    """Measure the parts of a run.

    Args:
        config: The run's settings.
        tell: Hears what is being done.

    Raises:
        ConfigError: A run of this kind cannot be planned.
        TbaError: The model, the task or a searcher failed, as it would in the run.
    """
    _check(config)
    threads = torch.get_num_threads()
    with TemporaryDirectory(prefix="tba-plan-") as folder, ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        return _Measurement(config, Path(folder), stack, tell).profile()


def _check(config: Config) -> None:
    if config.search.searchers == 0:
        raise ConfigError("search.searchers is 0, so there is nothing to plan: set it to 1")
    if not isinstance(config.runtime, LocalRuntimeConfig):
        raise ConfigError(
            f"runtime.kind is {config.runtime.kind}, where search and training take turns in one "
            "process; a plan is about processes: set it to local"
        )
    if load_objective(config.objective).sends_gradients:
        raise ConfigError(
            f"objective.kind is {config.objective.kind}, whose searchers send gradients: a plan "
            "knows only searchers that send trajectories; choose another objective"
        )


def _places(config: Config, device: str) -> int:
    """Return how many processes run at once; two at least share a GPU, as contention has it."""
    threads = max(trainer_threads(config), searcher_threads(config))
    return max(1 if device == "cpu" else 2, available_cores() // threads)


def _changed(config: Config, section: str, **values: Any) -> Config:
    """Return settings with some values of a section replaced, unchecked."""
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


def _by_turns(*measurements: Callable[[], Iterable[T]]) -> list[list[T]]:
    """Do each measurement in turn, `ROUNDS` times; return what each of them found."""
    found: list[list[T]] = [[] for _ in measurements]
    for _ in range(ROUNDS):
        for own, measured in zip(found, measurements, strict=True):
            own += measured()
    return found


class _Replay:
    """A runtime whose searchers have found everything already."""

    def __init__(self) -> None:
        self.waiting: list[pa.RecordBatch] = []
        """What the next `receive` returns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def open_round(self, number: int) -> None:
        del number

    def close_round(self, number: int) -> None:
        del number

    def receive(self, timeout_s: float) -> list[pa.RecordBatch]:
        del timeout_s
        waiting, self.waiting = self.waiting, []
        return waiting

    def next_gradient(self) -> Batch | None:
        return None

    def waiting_for(self, number: int) -> list[str]:
        del number
        return []

    def status(self) -> SearchStatus:
        return SearchStatus(tokens=0, busy_s=0.0, idle_s=0.0, alive=1, restarts=0)


class _Measurement:
    """The parts of a run, without the run."""

    def __init__(self, config: Config, folder: Path, stack: ExitStack, tell: Tell) -> None:
        config = _changed(config, "sync", mode="free")
        config = _changed(config, "buffer", max_staleness=None, max_reuse=None)
        self._given, self._folder, self._stack, self._tell = config, folder, stack, tell
        self._config = _changed(config, "trainer", learning_rate=0.0, head_learning_rate=0.0)
        self._device = pick_device(config.device)
        check_devices(config)
        device = torch.device(self._device)
        self._model_folder = initial_model(config, folder / "model", device, tell)
        torch.set_num_threads(trainer_threads(config))
        policy = load_trainable(self._model_folder, config, device=device)
        self._task = task_of(config, policy)
        self._update = PolicyUpdate(policy.model, self._config, policy.eos_ids)
        self._store = WeightStore(self._update.published(), getattr(torch, config.search.dtype))
        self._version = 0
        self._next_ticket = 0
        self._runtime = _Replay()
        self._buffer = ReplayBuffer.of(config.buffer, annotation_names(config.objective))
        arrivals = Arrivals(
            self._buffer, pass_threshold=self._task.pass_threshold, hopeless_after=NEVER
        )
        self._intake = Intake(
            self._runtime, arrivals, timeout_s=config.sync.timeout_s, interrupted=lambda: False
        )
        self._metrics = stack.enter_context(MetricsWriter(folder / "metrics.jsonl"))
        self._ledger = Ledger(Totals(), self._buffer, started=time.perf_counter())
        self._progress = Progress(config.trainer.steps, console=Console(quiet=True))

    def profile(self) -> Profile:
        """Measure one thing after the other."""
        config, search = self._config, self._config.search
        self._tell("measuring search")
        fewer = max(1, search.samples_per_query // 2)
        shorter = max(1, search.max_completion_length // 2)
        variants = [
            config,
            _changed(config, "search", samples_per_query=fewer),
            _changed(config, "search", max_completion_length=shorter),
        ]
        with SearchProbe(self._search_plan(config), self._device) as probe:
            base, *others = _by_turns(*(partial(self._search, probe, own) for own in variants))
        self._tell("measuring the wires")
        publish_s, hash_s = self._publish()
        store_s, store_wait_s = self._log(base)
        add_s = self._add(base)
        self._tell("measuring training")
        half = max(1, config.trainer.queries_per_batch // 2)
        trainer = self._trainer(config)
        halved = self._trainer(_changed(config, "trainer", queries_per_batch=half))
        steps, smaller = _by_turns(lambda: self._steps(trainer), lambda: self._steps(halved))
        self._tell("measuring both at once")
        trainer_slowdown, searcher_slowdown = self._contention()
        weights = list(self._update.published().values())
        itemsize = getattr(torch, search.dtype).itemsize
        return Profile(
            config=self._given.model_dump(mode="json"),
            cores=available_cores(),
            places=_places(config, self._device),
            trainer_slowdown=trainer_slowdown,
            searcher_slowdown=searcher_slowdown,
            search=fit(_works(base), _works(chain(*others))),
            stages_s={
                str(stage): statistics.fmean(batch.seconds[stage] for batch in base)
                for stage in base[0].seconds
            },
            pull_s=statistics.fmean(batch.pull_s for batch in base),
            step=fit(steps, smaller),
            publish_s=publish_s,
            hash_s=hash_s,
            store_s=store_s,
            store_wait_s=store_wait_s,
            add_s=add_s,
            weight_bytes=sum(weight.numel() * itemsize for weight in weights),
            gradient_bytes=sum(4 * weight.numel() for weight in weights if weight.requires_grad),
            queries=len(self._task.train),
            responses=_responses(base, search.samples_per_query),
        )

    # --- searching

    def _search(self, probe: SearchProbe, config: Config) -> list[Searched]:
        """Search for a while, with new weights before each batch."""

        def search() -> Searched:
            self._publish_once()
            return probe.search()

        probe.open(config, self._next_ticket)
        search()  # the first one is always slow
        batches = list(repeated(search))
        self._next_ticket = batches[-1].found.column("ticket")[0].as_py() + 1
        return batches

    def _search_plan(self, config: Config) -> SearchPlan:
        stores = Stores(self._store, None)
        return SearchPlan(config, self._model_folder, stores, next_ticket=self._next_ticket)

    # --- the wires

    def _publish_once(self) -> tuple[float, float]:
        """Publish; return the seconds of the copy and those of the hash."""
        self._version += 1
        started = own_s()
        self._store.publish(self._update.published(), self._version)
        copied = own_s()
        self._store.flush()
        return copied - started, own_s() - copied

    def _publish(self) -> tuple[float, float]:
        times = np.array([self._publish_once() for _ in range(LEAST)])
        copy_s, hash_s = np.median(times, axis=0).tolist()
        return copy_s, hash_s

    def _log(self, batches: Sequence[Searched]) -> tuple[float, float]:
        """Return what logging costs the processor a trajectory, and how long a disk takes."""
        with RolloutLog(self._folder / "rollouts.arrows") as log:
            worked, waited = [], []
            for batch in batches:
                wall, processor = own_s(), time.thread_time()
                log.append_all([batch.payload])
                busy_s = time.thread_time() - processor
                worked.append(busy_s / len(batch.found))
                waited.append(max(own_s() - wall - busy_s, 0.0))
        return statistics.median(worked), statistics.median(waited)

    def _add(self, batches: Sequence[Searched]) -> float:
        times = []
        for batch in batches:
            self._runtime.waiting = [batch.found]
            started = own_s()
            self._intake.take()
            times.append((own_s() - started) / len(batch.found))
        return statistics.median(times)

    # --- training

    def _trainer(self, config: Config) -> Trainer:
        return Trainer(
            _changed(config, "sync", sync_every=NEVER),
            update=self._update,
            buffer=self._buffer,
            intake=self._intake,
            store=self._store,
            resets=None,
            version=self._version,
        )

    def _steps(self, trainer: Trainer) -> Iterator[Measured]:
        """Time steps for a while."""
        self._step(trainer)  # the first one is always slow
        return repeated(lambda: self._step(trainer))

    def _step(self, trainer: Trainer) -> Measured:
        """Do and note one step, as a run does."""
        started = own_s()
        report = trainer.step()
        assert report is not None, "nobody interrupts"
        self._ledger.note(report)
        self._metrics.write(
            report.step,
            {**report.metrics, **self._ledger.rates(self._runtime.status())},
            staleness=report.staleness,
        )
        self._progress.update(report)
        seconds = own_s() - started
        return Measured(seconds, int(report.metrics["tokens_trained"]), 0)

    def _contention(self) -> tuple[float, float]:
        config = _changed(_changed(self._config, "sync", mode="barrier"), "search", searchers=1)
        trainer = self._trainer(self._config)
        plan = self._search_plan(config)
        return measure_contention(plan, self._folder, lambda: self._step(trainer).seconds)


def _works(batches: Iterable[Searched]) -> list[Measured]:
    return [batch.work for batch in batches]


def _responses(batches: Sequence[Searched], samples: int) -> Responses:
    """Return the responses by query."""
    lengths, same = [], []
    for batch in batches:
        groups: dict[int, list[bytes]] = {}
        for query, tokens in zip(
            batch.found.column("query_id").to_pylist(), batch.found.column("tokens"), strict=True
        ):
            groups.setdefault(query, []).append(tokens.values.to_numpy().tobytes())
        for group in groups.values():
            assert len(group) == samples, "a query is searched once a batch"
            number = {response: i for i, response in enumerate(dict.fromkeys(group))}
            lengths.append([len(response) // 4 for response in group])  # 4 bytes a token
            same.append([number[response] for response in group])
    return Responses(lengths, same)
