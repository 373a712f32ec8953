"""What a task is: queries to train on, held-out queries, and how responses are rewarded."""

from collections.abc import Sequence
from dataclasses import dataclass

from tba.records import Query


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Reward functions by name; picklable, since only the scoring process imports them."""

    functions: tuple[str, ...]
    """Each a dotted path `package.module:function` or `path/to/file.py:function`, in TRL's form;
    without one nothing can be scored."""
    weights: tuple[float, ...]
    """Weight of each in the sum."""
    timeout_s: float
    """Longest time for one response, in seconds."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a query, as they were given; end-of-sequence not written out."""

    chosen: str
    """The better one."""
    rejected: str
    """The worse one."""


@dataclass(frozen=True, slots=True)
class Task:
    """A loaded task."""

    train: Sequence[Query]
    """Queries to search; `query_id` is the position here."""
    test: Sequence[Query]
    """Held-out queries; `query_id` is the position here."""
    reward: RewardSpec
    """How a response is scored."""
    pass_threshold: float
    """Reward from which a response counts as correct."""
    demonstrations: Sequence[str] | None
    """A correct response for each training query (end-of-sequence not written out), or None."""
    skipped: int
    """Rows left out because their prompt is longer than the limit."""
    pairs: Sequence[Pair] | None = None
    """The pair of each training query, where they were asked for."""
