"""All that moves between the parts: queries, responses, trajectories, batches and reports.

Records are frozen and hold numpy arrays, so that they can be sent between processes and read
without torch. Axes are `query, sample, token`, in that order; a response's tokens include its
end-of-sequence token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


GIVEN = -1
"""In the place of a ticket and of a searcher's lane: the trajectory was given with the task."""
EMBEDDING = "embedding"
"""Name, among the extras of a trajectory, of the sentence embedding of its text."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The policy ended it with the end-of-sequence token."""
    LENGTH = "length"
    """It was cut at the maximum completion length."""


class Outcome(StrEnum):
    """What became of scoring one response."""

    OK = "ok"
    """The reward is a finite number."""
    NOT_APPLICABLE = "not_applicable"
    """Every reward function returned None for it."""
    ERROR = "error"
    """The reward function raised."""
    TIMEOUT = "timeout"
    """The reward function did not return in time and was killed."""


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt x, with whatever its reward function wants to know."""

    query_id: int
    """Position in the task's training (or test) set."""
    prompt: str
    """The rendered text, chat template included."""
    prompt_ids: Int32
    """Tokens of `prompt`, shape [prompt]."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, passed to the reward function by name; `prompt` as the user gave it
    among them."""


@dataclass(frozen=True, slots=True)
class Response:
    """What an engine sampled for one query."""

    tokens: Int32
    """Shape [token]; the last one is the end-of-sequence token when `finish_reason` is STOP."""
    log_mu: Float32
    """Log-probability of each token under the policy that sampled it, temperature applied; shape
    [token]."""
    finish_reason: FinishReason
    """Why it ended."""


@dataclass(frozen=True, slots=True)
class Score:
    """A typed reward: a failure is never a zero."""

    outcome: Outcome
    """Whether `reward` may be used."""
    reward: float
    """The raw reward r(y; x); NaN unless the outcome is OK."""
    detail: str = ""
    """For ERROR and TIMEOUT: what happened, in one line."""
    extras: Mapping[str, Float32] = field(default_factory=dict, compare=False)
    """What the reward functions told besides, by name: numbers, shape [number]."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One scored response: what a searcher adds to the buffer (algorithm line S5)."""

    query_id: int
    """The query it answers."""
    prompt_ids: Int32
    """Shape [prompt]."""
    tokens: Int32
    """Shape [token], the end-of-sequence token included."""
    text: str
    """The decoded response, special tokens left out."""
    log_mu: Float32
    """Sampling log-probabilities, shape [token]."""
    log_ref: Float32
    """Reference log-probabilities at the same temperature, shape [token]."""
    score: Score
    """Outcome and raw reward."""
    finish_reason: FinishReason
    """Why the response ended."""
    policy_version: int
    """Optimiser steps behind the weights that sampled it."""
    reference_version: int
    """Optimiser steps behind the reference that scored it; 0 is the initial model."""
    ticket: int
    """Number of the search batch it came from; unique within a run, it fixes queries and random
    stream. `GIVEN` where it was not searched."""
    searcher: int
    """Lane of the searcher that found it, or `GIVEN`."""
    temperature: float
    """Sampling temperature."""
    extras: Mapping[str, Float32] = field(default_factory=dict)
    """What the objective needs besides, by its name (`tba.annotations`), each of shape [token]; and
    what the reward functions told besides."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a batch's loss, computed by the searcher that sampled the batch (A3C)."""

    of: Mapping[str, Float32]
    """By name of the published weight, in its shape; not clipped."""
    metrics: Mapping[str, float]
    """What the trainer would have measured on the batch, by name."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one trainer step learns from: Q queries with K samples each, stored once each.

    A row is a unique trajectory. `index[q, j]` is the row of the j-th sample of query q, so an
    array over rows turns into one over `[query, sample]` by `array[index]`.
    """

    prompts: tuple[Int32, ...]
    """Q prompts, each of shape [prompt]."""
    tokens: tuple[Int32, ...]
    """One per row, each of shape [token]."""
    log_mu: tuple[Float32, ...]
    """One per row, each of shape [token]."""
    log_ref: tuple[Float32, ...]
    """One per row, each of shape [token]."""
    reward: Float32
    """Shape [row]."""
    policy_version: Int64
    """Shape [row]."""
    reference_version: Int64
    """Shape [row]."""
    finished: Bool
    """Whether the response ended by itself; shape [row]."""
    slots: Int64
    """The buffer's handle of each row; shape [row]."""
    query_of_row: Int64
    """Position in `prompts` of each row's query; shape [row], not decreasing."""
    index: Int64
    """Shape [query, sample]."""
    on_policy: Bool
    """Whether each query was drawn from the most recent sync (the m branch); shape [query]."""
    extras: Mapping[str, tuple[Float32, ...]] = field(default_factory=dict)
    """What searchers computed for the objective besides, by its name; one per row, each of shape
    [token]."""
    gradient: Gradient | None = None
    """The whole batch's, where its searcher sent one; then `slots` are -1."""

    def select(self, queries: Sequence[int]) -> "Batch":
        """Return the batch of the given queries alone, in that order (a micro-batch)."""
        rows_of = [np.flatnonzero(self.query_of_row == q) for q in queries]
        rows = np.concatenate(rows_of)
        new_row = np.full(len(self.tokens), -1, dtype=np.int64)
        new_row[rows] = np.arange(len(rows))
        return replace(
            self._with_rows(rows),
            prompts=tuple(self.prompts[q] for q in queries),
            query_of_row=np.repeat(np.arange(len(queries)), [len(r) for r in rows_of]),
            index=new_row[self.index[list(queries)]],
            on_policy=self.on_policy[list(queries)],
        )

    def narrow(self, positions: Int64) -> "Batch":
        """Return the batch of some samples of each query, by position; [query, chosen]."""
        index = np.take_along_axis(self.index, positions, axis=1)
        rows, own = np.unique(index, return_inverse=True)
        return replace(self._with_rows(rows), index=own.reshape(index.shape))

    def _with_rows(self, rows: Int64) -> "Batch":
        """Return the batch with these rows alone; `index` is left to be set."""
        return replace(
            self,
            tokens=tuple(self.tokens[r] for r in rows),
            log_mu=tuple(self.log_mu[r] for r in rows),
            log_ref=tuple(self.log_ref[r] for r in rows),
            reward=self.reward[rows],
            policy_version=self.policy_version[rows],
            reference_version=self.reference_version[rows],
            finished=self.finished[rows],
            slots=self.slots[rows],
            query_of_row=self.query_of_row[rows],
            extras={name: tuple(values[r] for r in rows) for name, values in self.extras.items()},
            gradient=None,
        )


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Accuracy of one policy on held-out queries."""

    policy_version: int
    """Optimiser steps behind the policy."""
    queries: int
    """How many held-out queries were asked."""
    sampled_pass_at_1: float | None
    """Share of correct responses at the search temperature; None where the task knows no right and
    wrong."""
    greedy_pass_at_1: float | None
    """Share of queries whose most likely response, token by token, is correct; or None."""
    mean_response_tokens: float | None
    """Mean length of the sampled responses, in tokens; None where nothing was sampled, for want of
    a reward function."""
    excluded: int
    """Responses whose reward failed; they are left out of both shares."""
    seconds: float
    """Wall-clock time the evaluation took."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What else was found, by name: of the sampled responses `reward`, the mean raw reward, and
    what the task measures besides (`tba.tasks.base.Measure`); of given demonstrations `loss`, in
    nats a token."""

    def metrics(self) -> dict[str, float]:
        """Return what is known, as scalars by name, as in `docs/metrics.md`."""
        accuracy = {
            "eval_sampled_pass_at_1": self.sampled_pass_at_1,
            "eval_greedy_pass_at_1": self.greedy_pass_at_1,
        }
        known = {name: value for name, value in accuracy.items() if value is not None}
        measured = {f"eval_{name}": value for name, value in self.measured.items()}
        return {**known, **measured, "eval_seconds": self.seconds}


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one trainer step did: what logs, checkpoints and stop rules read."""

    step: int
    """Optimiser steps done, this one included: the policy version it produced."""
    metrics: Mapping[str, float]
    """Scalars by name, as in `docs/metrics.md`."""
    staleness: Int64
    """Trainer's version minus the sample's, for each sample of the batch; shape [query *
    sample]."""
    published: bool
    """Whether this step's weights went to the searchers (a sync point)."""
