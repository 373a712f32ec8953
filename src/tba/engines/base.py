"""The contract between a searcher and whatever generates its responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tba.records import Query, Response


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled; no penalty and no `generation_config.json` influences it."""

    samples_per_query: int
    """S: responses for each query."""
    temperature: float
    """Divides the logits; 0 takes the most likely token instead."""
    max_completion_length: int
    """Longest response in tokens, the end-of-sequence token included."""
    top_p: float = 1.0
    """Samples from the fewest tokens that have this share of the probability together; 1: from all.
    Searchers sample from all."""


class Engine(Protocol):
    """Generates responses with the weights it was last given.

    Invariants: each response ends at its first end-of-sequence token, which belongs to it; `log_mu`
        holds the
    float32 log-probabilities of the very distribution sampled from (at temperature 0: of the
    untempered one); the same weights, queries, sampling and generator state give the same responses
    on one machine. `generate` blocks until done and does not wait for another
    process.
    """

    def generate(
        self, queries: Sequence[Query], sampling: Sampling, generator: torch.Generator
    ) -> list[list[Response]]:
        """Sample `samples_per_query` responses for each query, in the order of the queries."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the live parameters by name, in a fixed order; `refresh` after writing them."""
        ...

    def refresh(self) -> None:
        """Generate with the parameters as they are now."""
        ...
