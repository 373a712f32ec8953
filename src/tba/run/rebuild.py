"""The buffer of a run, made again from its rollout log and what a checkpoint knows besides."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from tba.annotations import annotation_names
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.run.checkpoint import Checkpoint
from tba.run.rollouts import is_given


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A buffer, and what was read on the way."""

    buffer: ReplayBuffer
    """As the log and the checkpoint have it."""
    rows: int
    """Trajectories read."""
    next_ticket: int
    """Lowest ticket that no search batch had."""
    given: Mapping[int, int]
    """How many given answers (`tba.given`) to each query are among them."""


def rebuild_buffer(
    logged: Iterable[pa.RecordBatch], config: Config, checkpoint: Checkpoint | None, version: int
) -> Rebuilt:
    """Add the batches of a log to an empty buffer, in order, for a trainer of this version.

    Samples of versions later than the checkpoint count as its own: the policy that found them was
    lost. That stays so in later sittings, to whose versions those numbers mean nothing.
    """
    buffer = ReplayBuffer.of(config.buffer, annotation_names(config.objective))
    earlier = checkpoint.state.resumptions if checkpoint else ()
    next_ticket = rows = 0
    given: Counter[int] = Counter()
    for batch in logged:
        ceilings = [step for seen, step in earlier if rows < seen]
        buffer.add(batch, version_ceiling=min([version, *ceilings]))
        rows += batch.num_rows
        next_ticket = max(next_ticket, max(batch.column("ticket").to_pylist(), default=-1) + 1)
        given.update(batch.filter(is_given(batch)).column("query_id").to_pylist())
    if checkpoint is not None:
        buffer.load_state(checkpoint.buffer())
    return Rebuilt(buffer, rows, next_ticket, given)
