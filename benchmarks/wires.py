"""What the two wires cost the trainer: weights out, trajectories in.

    python -m benchmarks.wires

Weights: the shapes of SmolLM2-135M (or --scale of each side of them) go through `tba.sync`, beside
a bare copy of the same bytes. Trajectories: one process plays 32 searchers that deliver prepared
batches of recipe `arithmetic` through 32 pipes into the local runtime. Steps are those of the real
trainer of that recipe on one thread; their time is compared between blocks of steps in which
nothing else happens and blocks in which searchers deliver, a searcher pulls weights all the time,
or the hash of published weights is computed, by turns.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.deliveries import Shape, deliveries
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.config.load import load_config
from tba.pace import NO_ROUND, Arrivals, Intake
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.run.rollouts import RolloutLog, to_bytes
from tba.runtimes.lanes import SearchPlan
from tba.runtimes.local import LocalRuntime
from tba.runtimes.searcher_process import Delivery
from tba.searcher import Stores
from tba.sync import NOTHING_PUBLISHED, WeightStore
from tba.trainer import Trainer
from tba.update import PolicyUpdate

SEARCHERS = 32
PAUSE, DELIVER, FLOOD, END = range(4)
"""What the process that plays the searchers is to do; FLOOD delivers as fast as it is read."""


def main() -> None:
    """Measure both wires and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of each side of the weights")
    parser.add_argument("--rate", type=int, default=5000, help="trajectories a second")
    parser.add_argument("--queries", type=int, default=32, help="in a delivery, 8 samples each")
    parser.add_argument("--blocks", type=int, default=8, help="of steps, of each kind")
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    weights = smollm2_like(arguments.scale)
    print("\n".join(weight_lines(weights)), flush=True)
    shape = Shape(queries=arguments.queries)
    with playing(weights, shape, arguments.rate) as stage:
        lines = [*intake_lines(stage, shape), "", *step_lines(stage, arguments)]
    print("\n" + "\n".join(lines))


# --- weights ---------------------------------------------------------------------------------


def smollm2_like(scale: float) -> dict[str, Tensor]:
    """Return random float32 weights with the shapes of SmolLM2-135M, its sides scaled."""
    hidden, inner, keys, words = (round(scale * n) for n in (576, 1536, 192, 49_152))
    sides = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
    sides |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    sides |= {"norm": (hidden,), "norm2": (hidden,)}
    shapes = {f"{layer}.{name}": side for layer in range(30) for name, side in sides.items()}
    shapes |= {"words": (words, hidden), "norm": (hidden,)}
    return {name: torch.rand(side) for name, side in shapes.items()}


def weight_lines(weights: dict[str, Tensor], repeats: int = 7) -> Iterable[str]:
    """Yield the table of the weights' wire."""
    size = sum(weight.nbytes for weight in weights.values()) / 1e6
    yield f"| {size:.0f} MB of float32 weights travel as | float32 | bfloat16 |"
    yield "|---|---|---|"
    columns = [_publishing(weights, dtype, repeats) for dtype in (torch.float32, torch.bfloat16)]
    for name in columns[0]:
        yield f"| {name}, ms | " + " | ".join(f"{column[name]:.1f}" for column in columns) + " |"


def _publishing(weights: dict[str, Tensor], dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Return the median times of publishing, in ms."""
    store = WeightStore(weights, dtype)
    bare, into = ({k: torch.zeros_like(w, dtype=dtype) for k, w in weights.items()} for _ in "ab")
    times: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(_seconds(work))

    for version in range(repeats):
        note("a bare copy, which is the floor", lambda: [bare[k].copy_(weights[k]) for k in bare])
        started = time.perf_counter()
        note("the trainer stops for `publish`", partial(store.publish, weights, version))
        store.flush()
        times.setdefault("until they are current", []).append(time.perf_counter() - started)
        note("a searcher's `pull`", partial(store.pull, into, version - 1))
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


# --- the stage -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A trainer, what plays its searchers, and other weights on their way."""

    trainer: Trainer
    """Of recipe `arithmetic`, with random weights."""
    intake: Intake
    """Where it takes in trajectories."""
    orders: Tensor
    """Shared: what the searchers are to do, and whether one is to pull."""
    store: WeightStore
    """The other weights' wire."""
    weights: dict[str, Tensor]
    """The other weights."""


class PlayedSearchers(LocalRuntime):
    """The local runtime with one process behind all of its pipes."""

    def play(self, shape: Shape, rate: int, orders: Tensor, count: int) -> None:
        """Start the process, which prepares `count` deliveries before it sends any."""
        pipes = [self._context.Pipe(duplex=False) for _ in range(SEARCHERS)]
        theirs = [pipe[1] for pipe in pipes]
        player = self._context.Process(target=_play, args=(theirs, shape, rate, orders, count))
        player.start()
        for pipe in theirs:
            pipe.close()
        self._played = [(player, pipe[0]) for pipe in pipes]

    def _start(self, lane: int, first_ticket: int, ended: int) -> tuple[BaseProcess, Connection]:
        del first_ticket, ended
        self._board.seat(lane)
        return self._played[lane]


def _play(pipes: Sequence[Connection], shape: Shape, rate: int, orders: Tensor, count: int) -> None:
    """Play all searchers until told to end."""
    torch.set_num_threads(1)
    coming = deliveries(count, shape, all_queries=10_000)
    sent = [Delivery(to_bytes(batch), shape.rows * shape.response, NO_ROUND, 0) for batch in coming]
    orders[2] = 1
    number, due = 0, time.perf_counter()
    while orders[0] != END:
        if orders[0] == PAUSE:
            due = time.perf_counter()
        if orders[0] == PAUSE or (orders[0] == DELIVER and time.perf_counter() < due):
            time.sleep(0.002)
            continue
        pipes[number % len(pipes)].send(sent[number % len(sent)])
        number += 1
        due += shape.rows / rate


def _pull(store: WeightStore, into: dict[str, Tensor], orders: Tensor) -> None:
    """Play a searcher that pulls all the time while it is told to."""
    torch.set_num_threads(1)
    while orders[0] != END:
        if orders[1]:
            store.pull(into, NOTHING_PUBLISHED)
        else:
            time.sleep(0.002)


@contextmanager
def playing(weights: dict[str, Tensor], shape: Shape, rate: int) -> Iterator[Stage]:
    """Set the stage, and clear it."""
    orders = torch.zeros(3, dtype=torch.int64).share_memory_()
    other = WeightStore(weights, torch.float32)
    other.publish(weights, 0)
    other.flush()
    into = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    puller = torch.multiprocessing.get_context("spawn").Process(
        target=_pull, args=(other, into, orders)
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rollouts = stack.enter_context(RolloutLog(folder / "rollouts.arrows"))
        puller.start()
        stack.callback(puller.join, 30)
        stack.callback(orders.__setitem__, 0, END)
        config = _config()
        policy_folder = folder / "model"
        assert config.model.build is not None
        build_policy(config.model.build, policy_folder, seed=0)
        policy = load_policy(
            str(policy_folder), config.model, device=torch.device("cpu"), dtype=torch.float32
        )
        update = PolicyUpdate(policy.model, config, policy.eos_ids)
        store = WeightStore(update.published(), torch.float32)
        runtime = PlayedSearchers(
            SearchPlan(config, str(policy_folder), Stores(store, None), next_ticket=0),
            rollouts,
            devices=["cpu"],
            threads=1,
            log_folder=str(folder),
        )
        runtime.play(shape, rate, orders, count=max(60 * rate // shape.rows, SEARCHERS))
        while not orders[2]:  # the deliveries are being prepared
            time.sleep(0.1)
        buffer = ReplayBuffer(config.buffer.capacity_per_query)
        intake = Intake(
            stack.enter_context(runtime),
            Arrivals(buffer, pass_threshold=1.0, hopeless_after=10**6),
            timeout_s=60.0,
            interrupted=lambda: False,
        )
        stack.callback(orders.__setitem__, 0, END)  # before the runtime waits for its searchers
        trainer = Trainer(
            config,
            update=update,
            buffer=buffer,
            intake=intake,
            store=store,
            resets=None,
            version=0,
        )
        yield Stage(trainer, intake, orders, other, weights)


def _config() -> Config:
    quiet = ["--sync.stall_warning_s=3600", "--sync.timeout_s=7200", "--trainer.steps=1000000"]
    kind = '--runtime={kind = "local"}'
    return load_config(["arithmetic"], [*quiet, kind, f"--search.searchers={SEARCHERS}"])


# --- trajectories ----------------------------------------------------------------------------


def intake_lines(stage: Stage, shape: Shape, seconds: float = 3.0) -> Iterable[str]:
    """Yield the table of what a trajectory costs the trainer's process, all its threads."""
    yield f"| deliveries of {shape.rows} trajectories | trajectories/s | CPU us each |"
    yield "|---|---|---|"
    for name, order in (("at the given rate", DELIVER), ("as fast as they are read", FLOOD)):
        stage.orders[0] = order
        stage.intake.take(1.0)
        seen, wall, cpu = stage.intake.arrivals.scored, time.perf_counter(), time.process_time()
        while time.perf_counter() < wall + seconds:
            stage.intake.take(0.05)
        seen = stage.intake.arrivals.scored - seen
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        stage.orders[0] = PAUSE
        while stage.intake.take(0.3):
            pass
        yield f"| {name} | {seen / wall:,.0f} | {1e6 * cpu / seen:.1f} |"


def step_lines(stage: Stage, arguments: argparse.Namespace) -> Iterable[str]:
    """Yield the table of the trainer's steps beside other things."""
    kinds: dict[str, Callable[[Stage], object]] = {
        "nothing": lambda stage: None,
        f"{SEARCHERS} searchers deliver {arguments.rate:,}/s": _deliver,
        "a searcher pulls weights": _let_pull,
        "published weights are hashed": _hash,
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    arrived: dict[str, int] = dict.fromkeys(kinds, 0)
    for block in range(arguments.blocks + 1):
        for kind, begin in kinds.items():
            stage.orders[:2] = torch.tensor([PAUSE, 0])
            stage.store.flush()
            stage.intake.take(0.02)
            begin(stage)
            before = stage.intake.arrivals.scored
            for _ in range(arguments.steps):
                if begin is _hash:
                    begin(stage)
                seconds = _seconds(stage.trainer.step)
                if block:  # the first one warms up
                    times[kind].append(seconds)
            arrived[kind] += (stage.intake.arrivals.scored - before) if block else 0
    stage.orders[:2] = torch.tensor([PAUSE, 0])
    yield "| meanwhile | trajectories/s | step, ms: mean | over nothing | median | over nothing |"
    yield "|---" * 6 + "|"
    first = times["nothing"]
    for kind, seconds in times.items():
        cells = [f"{arrived[kind] / sum(seconds):,.0f}"]
        for average in (statistics.mean, statistics.median):
            cells += [f"{1e3 * average(seconds):.2f}", f"{average(seconds) / average(first):.3f}"]
        yield f"| {kind} | " + " | ".join(cells) + " |"


def _deliver(stage: Stage) -> None:
    stage.orders[0] = DELIVER


def _let_pull(stage: Stage) -> None:
    stage.orders[1] = 1


def _hash(stage: Stage) -> None:
    stage.store.publish(stage.weights, stage.store.version + 1)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
