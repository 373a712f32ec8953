"""Given pairs: the answers `chosen` and `rejected` of the training rows, as trajectories.

    tokens        the answer's, then the end-of-sequence token
    reward        1 for the chosen answer, 0 for the rejected one
    log_ref       under the initial model, at the search temperature
    log_mu        the same: nobody knows the policy that wrote the answers, so it is taken to be the
                  reference, and objectives that ask for it are refused
    version 0; `GIVEN` in the place of ticket and searcher

Each row is a query of its own, so that rows which repeat a prompt keep their pairs apart. Both
answers of a row are logged in one batch, which a crash leaves whole or not at all: what a log lacks
of the pairs is added when the run is resumed, and nothing twice.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tba.annotations import annotation_names
from tba.config import Config, ObjectiveConfig
from tba.errors import ConfigError, DataError
from tba.objectives import load_objective
from tba.policy.loading import Policy
from tba.policy.reference import Reference
from tba.records import (
    GIVEN,
    FinishReason,
    Float32,
    Int32,
    Outcome,
    Query,
    Score,
    Trajectory,
)
from tba.run.rollouts import encode
from tba.tasks.base import Task
from tba.tasks.prompts import tokenize

PAIRS_PER_BATCH = 256
"""Pairs scored by the reference and logged at a time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a pair."""

    text: str
    """As it was given."""
    tokens: Int32
    """With the end-of-sequence token; shape [token]."""
    reward: float
    """1 if it was chosen, 0 if it was rejected."""


@dataclass(frozen=True, slots=True)
class GivenPairs:
    """The pairs that can be learned from, and how many cannot."""

    pairs: tuple[tuple[Query, Answer, Answer], ...]
    """Query, chosen and rejected answer."""
    too_long: int
    """Pairs with an answer of more than `search.max_completion_length` tokens."""
    equal: int
    """Pairs of two equal answers."""

    def skipped(self) -> str:
        """Say what was left out, in words; nothing when nothing was."""
        reasons = {
            "an answer longer than search.max_completion_length": self.too_long,
            "two equal answers": self.equal,
        }
        told = [f"{count} with {reason}" for reason, count in reasons.items() if count]
        return f"skipped given pairs: {', '.join(told)}" if told else ""


def check_objective(section: ObjectiveConfig) -> None:
    """Refuse an objective that asks for what nobody knows of a given answer.

    Raises:
        ConfigError: It asks for `log_mu`, or for what searchers compute besides.
    """
    objective = load_objective(section)
    unknown = {"log_mu", *annotation_names(section)}
    for name in (*objective.inputs(), *objective.inputs_of_preparation()):
        if name in unknown:
            raise ConfigError(
                f"buffer.given_pairs is true, but objective.kind = {section.kind} asks for {name}, "
                "which is not known of answers that no searcher sampled: choose another objective, "
                "such as dpo"
            )


def read_given_pairs(task: Task, policy: Policy, longest: int) -> GivenPairs:
    """Tokenize the pairs of a task that was loaded with them.

    Args:
        task: With `pairs`.
        policy: Its tokenizer and end-of-sequence token.
        longest: Most tokens of an answer, the end-of-sequence token included.

    Raises:
        DataError: No pair is left, or the tokenizer does not know a character.
    """
    assert task.pairs is not None
    chosen = _answers([pair.chosen for pair in task.pairs], policy, reward=1.0)
    rejected = _answers([pair.rejected for pair in task.pairs], policy, reward=0.0)
    kept = []
    too_long = equal = 0
    for pair in zip(task.train, chosen, rejected, strict=True):
        _, better, worse = pair
        if max(len(better.tokens), len(worse.tokens)) > longest:
            too_long += 1
        elif np.array_equal(better.tokens, worse.tokens):
            equal += 1
        else:
            kept.append(pair)
    found = GivenPairs(tuple(kept), too_long, equal)
    if not kept:
        raise DataError(
            f"no given pair can be used, of {len(task.train)} rows to train on: {found.skipped()}"
        )
    return found


def batches(
    given: GivenPairs, logged: Collection[int], reference: Reference, config: Config
) -> Iterator[pa.RecordBatch]:
    """Yield the pairs of the queries that are not logged yet, as batches of the rollout log."""
    missing = [pair for pair in given.pairs if pair[0].query_id not in logged]
    for first in range(0, len(missing), PAIRS_PER_BATCH):
        pairs = missing[first : first + PAIRS_PER_BATCH]
        answers = [answer for _, *both in pairs for answer in both]
        log_ref = reference.log_ref(
            [query.prompt_ids for query, *_ in pairs],
            [answer.tokens for answer in answers],
            np.repeat(np.arange(len(pairs)), 2),
        )
        queries = [query for query, *both in pairs for _ in both]
        yield encode(
            [
                _trajectory(*row, temperature=config.search.temperature)
                for row in zip(queries, answers, log_ref, strict=True)
            ]
        )


def _answers(texts: Sequence[str], policy: Policy, *, reward: float) -> list[Answer]:
    ids = tokenize(texts, policy.tokenizer, what="an answer", special_tokens=False)
    stop = policy.eos_ids[0]
    return [
        Answer(text, np.array(own if own[-1:] == [stop] else [*own, stop], np.int32), reward)
        for text, own in zip(texts, ids, strict=True)
    ]


def _trajectory(
    query: Query, answer: Answer, log_ref: Float32, *, temperature: float
) -> Trajectory:
    return Trajectory(
        query_id=query.query_id,
        prompt_ids=query.prompt_ids,
        tokens=answer.tokens,
        text=answer.text,
        log_mu=log_ref,
        log_ref=log_ref,
        score=Score(Outcome.OK, answer.reward),
        finish_reason=FinishReason.STOP,
        policy_version=0,
        reference_version=0,
        ticket=GIVEN,
        searcher=GIVEN,
        temperature=temperature,
    )
