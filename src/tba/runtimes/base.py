"""What the trainer sees of the searchers, wherever they run."""

from dataclasses import dataclass
from typing import Protocol, Self

import pyarrow as pa

from tba.records import Batch


@dataclass(frozen=True, slots=True)
class SearchStatus:
    """Totals over all searchers of this session."""

    tokens: int
    """Response tokens generated."""
    busy_s: float
    """Seconds in which searchers searched, summed over searchers."""
    idle_s: float
    """Seconds in which searchers had nothing to do, summed over searchers."""
    alive: int
    """Searchers now alive."""
    restarts: int
    """Searchers that died and were replaced."""


class Runtime(Protocol):
    """Searchers at work, one lane each.

    Invariants: what `receive` returns is durable in the rollout log, in the order of the log;
    rounds are opened in increasing order, and only after the weights they search with were
    published. Only `receive` blocks, at most for its timeout; it raises what made searching
    impossible (`SearcherFailedError`, `StorageError`, a `UserError` from a searcher). Leaving the
    context ends every searcher.
    """

    def __enter__(self) -> Self:
        """Start the searchers."""
        ...

    def __exit__(self, *exc_info: object) -> None:
        """End the searchers."""
        ...

    def open_round(self, number: int) -> None:
        """Let the searchers of `barrier` and `lockstep` mode search round `number`."""
        ...

    def close_round(self, number: int) -> None:
        """Ask the searchers of `barrier` mode to deliver what they found in round `number`."""
        ...

    def receive(self, timeout_s: float) -> list[pa.RecordBatch]:
        """Return what arrived since the last call; wait up to `timeout_s` for the first."""
        ...

    def next_gradient(self) -> Batch | None:
        """Return the oldest batch with a gradient that a searcher has sent; never waits."""
        ...

    def waiting_for(self, number: int) -> list[str]:
        """Name searchers that have not delivered round `number`, with their last event's age."""
        ...

    def status(self) -> SearchStatus:
        """Return totals."""
        ...
