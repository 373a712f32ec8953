"""What a task is: queries to train on, held-out queries, and how responses are rewarded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tba.errors import DataError
from tba.records import Query, Response, Score


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
    options: tuple[Mapping[str, Any], ...] = ()
    """For each function, keyword arguments of the call that makes it; where there are some, the
    path names what makes the function: a class such as a reward model, or a function that returns
    one."""
    start_timeout_s: float = 60.0
    """Longest time to import and make all functions, in seconds."""
    missing_eos_penalty: float | None = None
    """Reward, in the place of what the functions say, of a response that does not end with one of
    `eos_ids`; None: none."""
    eos_ids: tuple[int, ...] = ()
    """The policy's tokens that end a response."""
    setting: str | None = None
    """The setting that names what scores, with its value, for messages; None: reward functions,
    which their own names tell."""

    def called(self, function: str) -> str:
        """Return how messages call one of the functions."""
        return self.setting or f"reward function {function}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a query, as they were given; end-of-sequence not written out."""

    chosen: str
    """The better one."""
    rejected: str
    """The worse one."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How a policy answered held-out queries; the sequences are aligned."""

    queries: Sequence[Query]
    """One entry a response."""
    responses: Sequence[Response]
    """Sampled at the search temperature."""
    texts: Sequence[str]
    """Decoded responses."""
    scores: Sequence[Score]
    """Their rewards."""
    reference_texts: Sequence[str] | None = None
    """How the reference answered the same queries, sampled in the same way; None where it is not
    known."""


class Measure(Protocol):
    """Tells more of a policy's answers than rewards do: a win rate, diversity, length."""

    def __call__(self, answered: Answered) -> Mapping[str, float]:
        """Return finite numbers by name, in snake case; it may take as long as it needs.

        Raises:
            TbaError: It cannot be told; the message says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A loaded task."""

    train: Sequence[Query]
    """Queries to search; `query_id` is the position here."""
    test: Sequence[Query]
    """Held-out queries; `query_id` is the position here."""
    reward: RewardSpec
    """How a response is scored."""
    pass_threshold: float | None
    """Reward from which a response counts as correct; None where nothing is right or wrong."""
    demonstrations: Sequence[str] | None
    """A correct response for each training query (end-of-sequence not written out), or None."""
    skipped: int
    """Rows left out because their prompt is longer than the limit."""
    pairs: Sequence[Pair] | None = None
    """The pair of each training query, where they were asked for."""
    examples: Sequence[Sequence[str]] | None = None
    """Instead of demonstrations, responses of any quality to each training query, whose rewards are
    to be found, where they were asked for."""
    test_demonstrations: Sequence[str | None] | None = None
    """A correct response for each held-out query, of which not all need have one; or None."""
    measures: tuple[Measure, ...] = ()
    """What an evaluation tells besides reward and pass@1."""
    compares_with_reference: bool = False
    """Whether the measures want to know how the reference answered."""

    def demonstrated(self) -> Sequence[str]:
        """Return the demonstrations.

        Raises:
            DataError: There are none.
        """
        if self.demonstrations is None:
            raise DataError(
                "the task has no demonstrations to learn from: give rows with a column completion"
            )
        return self.demonstrations
