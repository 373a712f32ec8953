"""What the replay buffer costs at 10^4 to 10^7 trajectories.

    python -m benchmarks.buffer --out build/buffer

Deliveries are those of recipe `arithmetic`, 32 queries of 8 samples; every query is searched four
times, so its 32 samples lie in four places. Half of the samples have been used before. Batches of
64 queries with 8 samples are drawn from buffers of all sizes by turns, so that whatever else the
machine does falls on all of them alike. Ten million short trajectories need about 6 GB of memory
(two buffers at a time) and 1.5 GB of disk.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import safetensors.numpy

from benchmarks.arguments import count, counts
from benchmarks.deliveries import Shape, deliveries
from tba.buffer import ReplayBuffer
from tba.config import BufferConfig, Config
from tba.config.load import load_config
from tba.run.rebuild import rebuild_buffer
from tba.run.rollouts import RolloutLog, to_bytes
from tba.sampling import draw_batch

SIZES = (10**4, 10**5, 10**6, 10**7)
SEARCHES_PER_QUERY = 4
BYTES_PER_TOKEN = 12  # the token, log_mu and log_ref
AT_ONCE = 64  # deliveries written to the log together
RULES = {
    "uniform": {"on_policy_prob": 0},
    "softmax_reward": {"on_policy_prob": 0, "off_policy_sampling": "softmax_reward"},
    "most recent (m = 1)": {"on_policy_prob": 1, "recent_versions": 2},
    "uniform, max_staleness": {"on_policy_prob": 0, "max_staleness": 1},
    "uniform, max_reuse": {"on_policy_prob": 0, "max_reuse": 10_000},
    "uniform, both": {"on_policy_prob": 0, "max_staleness": 1, "max_reuse": 10_000},
}
"""Settings of each rule. A bound on staleness is the newer half of all versions; one on reuse is
reached by no sample, so that drawing does not use up the smallest buffer."""


@dataclass
class Measured:
    """One size of the buffer and what it cost."""

    buffer: ReplayBuffer
    """Filled."""
    size: int
    """Trajectories in it."""
    add_us: float
    """Of a trajectory."""
    longest_add_ms: float
    """Of a delivery."""
    checkpoint_s: float = 0.0
    """Of the state, arrays written to disk included."""
    rebuild_s: float = 0.0
    """From the log, the state included."""
    draws_ms: dict[str, list[float]] = field(default_factory=lambda: {rule: [] for rule in RULES})
    """Of each batch, by sampling rule."""


def main() -> None:
    """Measure all sizes and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/buffer"))
    parser.add_argument("--sizes", type=counts, default=SIZES)
    parser.add_argument("--response", type=count, default=8, help="tokens of a response")
    parser.add_argument("--draws", type=count, default=200)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = Shape(response=arguments.response)
    if min(arguments.sizes) < shape.rows:
        parser.error(f"--sizes has {min(arguments.sizes)}, but a delivery has {shape.rows}")
    measured = [fill(size, shape, arguments.out / f"{size}.arrows") for size in arguments.sizes]
    time_draws(measured, arguments.draws)
    page = "\n".join([*storage_lines(measured, shape), "", *draw_lines(measured)])
    (arguments.out / "table.md").write_text(page + "\n")
    print(page)


def fill(size: int, shape: Shape, file: Path) -> Measured:
    """Fill a buffer as a run does, save its state, and rebuild it from the log."""
    config = load_config(["arithmetic"])
    count = size // shape.rows
    queries = max(count * shape.queries // SEARCHES_PER_QUERY, shape.queries)
    buffer = ReplayBuffer(config.buffer.capacity_per_query)
    adds = []
    file.unlink(missing_ok=True)
    with RolloutLog(file) as log:
        coming = deliveries(count, shape, all_queries=queries)
        while some := list(islice(coming, AT_ONCE)):
            log.append_all([to_bytes(batch) for batch in some])
            adds += [_seconds(partial(buffer.add, batch)) for batch in some]
        buffer.count_use(np.arange(0, len(buffer), 2))
        measured = Measured(buffer, len(buffer), sum(adds) / len(buffer) * 1e6, 1e3 * max(adds))
        measured.checkpoint_s = _seconds(partial(_save, buffer, file.with_suffix(".state")))
        measured.rebuild_s = _seconds(partial(_rebuild, log, config, buffer))
    file.unlink()
    file.with_suffix(".state").unlink()
    gc.collect()
    return measured


def _save(buffer: ReplayBuffer, file: Path) -> None:
    safetensors.numpy.save_file(buffer.state(), file)


def _rebuild(log: RolloutLog, config: Config, buffer: ReplayBuffer) -> None:
    rebuilt = rebuild_buffer(log.read(), config, None, buffer.newest_version).buffer
    rebuilt.load_state(safetensors.numpy.load_file(log.path.with_suffix(".state")))
    assert len(rebuilt) == len(buffer)


def time_draws(measured: Sequence[Measured], draws: int) -> None:
    """Draw batches of every rule from every buffer by turns."""
    for number in range(draws):
        for rule in RULES:
            for one in measured:
                one.draws_ms[rule].append(1e3 * _seconds(partial(draw, one, rule, number)))


def draw(one: Measured, rule: str, number: int) -> None:
    """Draw one batch of the size of recipe `arithmetic`."""
    settings = dict(RULES[rule])
    newest = one.buffer.newest_version
    if "max_staleness" in settings:
        settings["max_staleness"] = newest // 2 + 1
    batch = draw_batch(
        one.buffer,
        queries_per_batch=64,
        samples_per_query=8,
        trainer_version=newest,
        config=BufferConfig.model_validate(settings),
        generator=np.random.default_rng(number),
    )
    assert batch is not None


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def storage_lines(measured: Sequence[Measured], shape: Shape) -> Iterable[str]:
    """Yield the table of what is kept."""
    tokens = BYTES_PER_TOKEN * shape.response
    yield (
        f"| trajectories of {shape.response} tokens | bytes over those of the tokens ({tokens}) "
        "| add, us each | longest add of a delivery, ms | checkpoint, s | rebuild, s |"
    )
    yield "|---" * 6 + "|"
    for one in measured:
        over = one.buffer.nbytes / one.size - tokens
        yield (
            f"| {one.size:,} | {over:.0f} | {one.add_us:.1f} | {one.longest_add_ms:.0f} "
            f"| {one.checkpoint_s:.3f} | {one.rebuild_s:.2f} |"
        )


def draw_lines(measured: Sequence[Measured]) -> Iterable[str]:
    """Yield the table of what a batch costs, in ms, and of its ratio to the smallest buffer's."""
    yield "| batch of 64 x 8, ms | " + " | ".join(f"{one.size:,}" for one in measured) + " |"
    yield "|---" * (len(measured) + 1) + "|"
    for rule in RULES:
        medians = [statistics.median(one.draws_ms[rule]) for one in measured]
        cells = [f"{ms:.2f} ({ms / medians[0]:.2f}x)" for ms in medians]
        yield f"| {rule} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
