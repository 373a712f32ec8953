"""Given answers: the pairs or demonstrations of the training rows, as trajectories.

    tokens        the answer's, then the end-of-sequence token
    reward        1 for a demonstration and the chosen answer of a pair, 0 for the rejected one
    log_ref       under the initial model, at the search temperature
    log_mu        the same: nobody knows the policy that wrote the answers, so it is taken to be the
                  reference, and objectives that ask for it are refused
    version 0; `GIVEN` in the place of ticket and searcher

Each row is a query of its own, so that rows which repeat a prompt keep their answers apart. All
answers of a row are logged in one batch, which a crash leaves whole or not at all: what a log lacks
of them is added when the run is resumed, and nothing twice.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tba.annotations import annotation_names
from tba.config import Config, ObjectiveConfig
from tba.config.search import Given
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

QUERIES_PER_BATCH = 256
"""Queries whose answers are scored by the reference and logged at a time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One given answer."""

    text: str
    """As it was given."""
    tokens: Int32
    """With the end-of-sequence token; shape [token]."""
    reward: float
    """0 if it was rejected, otherwise 1."""


@dataclass(frozen=True, slots=True)
class GivenAnswers:
    """The answers that can be learned from, and how many queries have none."""

    kind: Given
    """What they are."""
    of_queries: tuple[tuple[Query, tuple[Answer, ...]], ...]
    """Each query with its answers: a demonstration, or the chosen one and the rejected one."""
    too_long: int
    """Queries with an answer of more than `search.max_completion_length` tokens."""
    equal: int
    """Pairs of two equal answers."""

    def skipped(self) -> str:
        """Say what was left out, in words; nothing when nothing was."""
        reasons = {
            "an answer longer than search.max_completion_length": self.too_long,
            "two equal answers": self.equal,
        }
        told = [f"{count} with {reason}" for reason, count in reasons.items() if count]
        return f"skipped given {self.kind}: {', '.join(told)}" if told else ""

    def missing(self, logged: Collection[int]) -> list[tuple[Query, tuple[Answer, ...]]]:
        """Return those of the queries that are not logged yet."""
        return [own for own in self.of_queries if own[0].query_id not in logged]


def check_objective(config: Config) -> None:
    """Refuse an objective that asks for what nobody knows of a given answer.

    Raises:
        ConfigError: It asks for `log_mu`, or for what searchers compute besides.
    """
    objective = load_objective(config.objective)
    unknown = {"log_mu", *annotation_names(config.objective)}
    for name in (*objective.inputs(), *objective.inputs_of_preparation()):
        if name in unknown:
            raise ConfigError(
                f"buffer.given is {config.buffer.given}, but objective.kind = "
                f"{config.objective.kind} asks for {name}, which is not known of answers that no "
                "searcher sampled: choose another objective, such as dpo or sft"
            )


def check_temperatures(section: ObjectiveConfig) -> None:
    """Refuse an objective that takes the sampling policy for an older one, if it is a flatter one.

    Raises:
        ConfigError: It asks for `log_mu`.
    """
    objective = load_objective(section)
    if "log_mu" in (*objective.inputs(), *objective.inputs_of_preparation()):
        raise ConfigError(
            f"search.temperature_range is set, but objective.kind = {section.kind} asks for log_mu "
            "and takes it for that of an older policy at search.temperature: leave the range out, "
            "or choose an objective without a ratio, such as tb"
        )


def read_given(kind: Given, task: Task, policy: Policy, *, longest: int) -> GivenAnswers:
    """Tokenize the answers of a task that was loaded with them.

    Args:
        kind: Which answers.
        task: With `pairs` or `demonstrations`.
        policy: Its tokenizer and end-of-sequence token.
        longest: Most tokens of an answer, the end-of-sequence token included.

    Raises:
        DataError: No answer is left, or the tokenizer does not know a character.
    """
    kept = []
    too_long = equal = 0
    for query, *answers in zip(task.train, *_columns(kind, task, policy), strict=True):
        if max(len(answer.tokens) for answer in answers) > longest:
            too_long += 1
        elif len(answers) > 1 and np.array_equal(answers[0].tokens, answers[1].tokens):
            equal += 1
        else:
            kept.append((query, tuple(answers)))
    found = GivenAnswers(kind, tuple(kept), too_long, equal)
    if not kept:
        raise DataError(
            f"none of the given {kind} can be used, of {len(task.train)} rows to train on: "
            f"{found.skipped()}"
        )
    return found


def _columns(kind: Given, task: Task, policy: Policy) -> list[list[Answer]]:
    """Return the first answer of each query and, for pairs, the second."""
    if kind == "pairs":
        assert task.pairs is not None
        return [
            tokenize_answers([pair.chosen for pair in task.pairs], policy),
            tokenize_answers([pair.rejected for pair in task.pairs], policy, reward=0.0),
        ]
    return [tokenize_answers(task.demonstrated(), policy)]


def tokenize_answers(texts: Sequence[str], policy: Policy, *, reward: float = 1.0) -> list[Answer]:
    """Return the answers as a searcher would have found them.

    Raises:
        DataError: The tokenizer does not know a character.
    """
    ids = tokenize(texts, policy.tokenizer, what="an answer", special_tokens=False)
    stop = policy.eos_ids[0]
    return [
        Answer(text, np.array(own if own[-1:] == [stop] else [*own, stop], np.int32), reward)
        for text, own in zip(texts, ids, strict=True)
    ]


def batches(
    given: GivenAnswers, logged: Collection[int], reference: Reference, config: Config
) -> Iterator[pa.RecordBatch]:
    """Yield the answers of the queries that are not logged yet, as batches of the rollout log."""
    missing = given.missing(logged)
    for first in range(0, len(missing), QUERIES_PER_BATCH):
        part = missing[first : first + QUERIES_PER_BATCH]
        rows = [(query, answer) for query, answers in part for answer in answers]
        log_ref = reference.log_ref(
            [query.prompt_ids for query, _ in part],
            [answer.tokens for _, answer in rows],
            np.repeat(np.arange(len(part)), [len(answers) for _, answers in part]),
        )
        yield encode(
            [
                _trajectory(*row, values, temperature=config.search.temperature)
                for row, values in zip(rows, log_ref, strict=True)
            ]
        )


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
