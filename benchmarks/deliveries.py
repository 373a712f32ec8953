"""Deliveries of ready-made trajectories, for measuring what they cost where they arrive."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tba.records import FinishReason, Outcome
from tba.run.rollouts import SCHEMA


@dataclass(frozen=True)
class Shape:
    """What a delivery looks like; the defaults are those of recipe `arithmetic`."""

    queries: int = 32
    """Queries in a delivery."""
    samples: int = 8
    """Responses to each."""
    prompt: int = 8
    """Tokens of a prompt."""
    response: int = 5
    """Tokens of a response."""

    @property
    def rows(self) -> int:
        """Trajectories in a delivery."""
        return self.queries * self.samples


def deliveries(
    count: int, shape: Shape, *, all_queries: int, seed: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield deliveries over `all_queries` queries in turn, each of the policy version after."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        first = number * shape.queries
        query = (first + np.arange(shape.queries)) % all_queries
        yield _delivery(rng, np.repeat(query, shape.samples), shape, version=number)


def _delivery(
    rng: np.random.Generator, query: np.ndarray, shape: Shape, version: int
) -> pa.RecordBatch:
    rows = len(query)
    tokens = rng.integers(0, 12, rows * shape.response, dtype=np.int32)
    log_prob = -rng.random(rows * shape.response, dtype=np.float32)
    columns = {
        "query_id": query,
        "prompt_ids": _lists(np.arange(rows * shape.prompt) % 12, shape.prompt, pa.int32()),
        "tokens": _lists(tokens, shape.response, pa.int32()),
        "text": ["a" * shape.response] * rows,
        "log_mu": _lists(log_prob, shape.response, pa.float32()),
        "log_ref": _lists(log_prob, shape.response, pa.float32()),
        "outcome": [Outcome.OK.value] * rows,
        "reward": rng.random(rows),
        "detail": [""] * rows,
        "finish_reason": [FinishReason.STOP.value] * rows,
        "policy_version": np.full(rows, version),
        "reference_version": np.zeros(rows, dtype=np.int64),
        "ticket": np.full(rows, version),
        "searcher": np.zeros(rows, dtype=np.int64),
        "temperature": np.ones(rows),
        "extras": [[]] * rows,
    }
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, field.type)
        for field, values in zip(SCHEMA, columns.values(), strict=True)
    ]
    return pa.record_batch(arrays, schema=SCHEMA)


def _lists(values: np.ndarray, length: int, kind: pa.DataType) -> pa.ListArray:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind))
