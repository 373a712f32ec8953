"""Given answers: the pairs or demonstrations of the training rows, as trajectories.

    tokens        the answer's, then the end-of-sequence token
    reward        1 for a demonstration and the chosen answer of a pair, 0 for the rejected one;
                  examples (of attacks) are scored as what a searcher finds is
    log_ref       under the initial model, at the search temperature
    log_mu        the same: nobody knows the policy that wrote the answers, so it is taken to be the
                  reference, and objectives that ask for it are refused
    version 0; `GIVEN` in the place of ticket and searcher

Each row is a query of its own, so that rows which repeat a prompt keep their answers apart; the
examples of a prompt are answers to one query. All are logged in order, in batches which a crash
leaves whole or not at all: what a log lacks of them is added when the run is resumed, and nothing
twice. An example that cannot be scored is logged so, counted and not learned from.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import pyarrow as pa

from tba.annotations import annotation_names
from tba.config import Config, ObjectiveConfig
from tba.config.search import Given
from tba.errors import AllExcludedError, ConfigError, DataError
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

ANSWERS_PER_BATCH = 256
"""Answers that are scored, by the task and by the reference, and logged at a time."""


class SupportsScore(Protocol):
    """Whatever turns tokens into texts and typed rewards (`tba.searcher.Judge`)."""

    def score(
        self, queries: Sequence[Query], tokens: Sequence[Int32]
    ) -> tuple[list[str], list[Score]]:
        """Decode and score aligned responses."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One given answer."""

    text: str
    """As it was given."""
    tokens: Int32
    """With the end-of-sequence token; shape [token]."""
    reward: float | None
    """0 if it was rejected, otherwise 1; None if it is to be scored."""


@dataclass(frozen=True, slots=True)
class GivenAnswers:
    """The answers that can be learned from, and how many queries have none."""

    kind: Given
    """What they are."""
    of_queries: tuple[tuple[Query, tuple[Answer, ...]], ...]
    """Each query with its answers: a demonstration, the chosen one and the rejected one, or
    examples."""
    too_long: int
    """Rows with an answer of more than `search.max_completion_length` tokens."""
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

    def beginning(self, config: Config, logged: int) -> str:
        """Say how many there are and were logged before, and how long an epoch of them is."""
        queries, per_batch = len(self.of_queries), config.trainer.queries_per_batch
        answers = sum(len(own) for _, own in self.of_queries)
        rows = queries if self.kind == "pairs" else answers
        epoch = "" if config.search.searchers else f"; an epoch is {queries / per_batch:.4g} steps"
        before = f" ({logged} answers of them were logged before)" if logged else ""
        return f"the buffer starts with {rows} given {self.kind}{before}{epoch}"

    def missing(self, logged: Mapping[int, int]) -> list[tuple[Query, Answer]]:
        """Return the answers that are not logged yet, of which so many of each query are."""
        return [
            (query, answer)
            for query, answers in self.of_queries
            for answer in answers[logged.get(query.query_id, 0) :]
        ]


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
        task: With `pairs`, `demonstrations` or `examples`.
        policy: Its tokenizer and end-of-sequence token.
        longest: Most tokens of an answer, the end-of-sequence token included.

    Raises:
        DataError: No answer is left, or the tokenizer does not know a character.
    """
    if task.examples is None:
        found = _of_rows(kind, task, policy, longest)
    else:
        found = _of_prompts(kind, task, task.examples, policy, longest)
    if not found.of_queries:
        raise DataError(
            f"none of the given {kind} can be used, of {len(task.train)} rows to train on: "
            f"{found.skipped()}"
        )
    return found


def _of_rows(kind: Given, task: Task, policy: Policy, longest: int) -> GivenAnswers:
    """Return the answers of rows that are a query each."""
    kept = []
    too_long = equal = 0
    for query, *answers in zip(task.train, *_columns(kind, task, policy), strict=True):
        if max(len(answer.tokens) for answer in answers) > longest:
            too_long += 1
        elif len(answers) > 1 and np.array_equal(answers[0].tokens, answers[1].tokens):
            equal += 1
        else:
            kept.append((query, tuple(answers)))
    return GivenAnswers(kind, tuple(kept), too_long, equal)


def _of_prompts(
    kind: Given, task: Task, examples: Sequence[Sequence[str]], policy: Policy, longest: int
) -> GivenAnswers:
    """Return the examples of each query, to be scored."""
    texts = [text for own in examples for text in own]
    answers = iter(tokenize_answers(texts, policy, reward=None))
    kept = []
    for query, own in zip(task.train, examples, strict=True):
        fits = tuple(a for a in islice(answers, len(own)) if len(a.tokens) <= longest)
        if fits:
            kept.append((query, fits))
    count = sum(len(own) for _, own in kept)
    return GivenAnswers(kind, tuple(kept), too_long=len(texts) - count, equal=0)


def _columns(kind: Given, task: Task, policy: Policy) -> list[list[Answer]]:
    """Return the first answer of each query and, for pairs, the second."""
    if kind == "pairs":
        assert task.pairs is not None
        return [
            tokenize_answers([pair.chosen for pair in task.pairs], policy),
            tokenize_answers([pair.rejected for pair in task.pairs], policy, reward=0.0),
        ]
    return [tokenize_answers(task.demonstrated(), policy)]


def tokenize_answers(
    texts: Sequence[str], policy: Policy, *, reward: float | None = 1.0
) -> list[Answer]:
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
    missing: Sequence[tuple[Query, Answer]],
    reference: Reference,
    judge: SupportsScore | None,
    temperature: float,
    is_first: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield answers as batches of the rollout log.

    Args:
        missing: What is not logged yet, in order.
        reference: Their log-probabilities are taken from it.
        judge: Scores those that have no reward.
        temperature: That of the search.
        is_first: Whether nothing is logged yet.

    Raises:
        AllExcludedError: None of the first answers of all could be scored.
    """
    for first in range(0, len(missing), ANSWERS_PER_BATCH):
        rows = missing[first : first + ANSWERS_PER_BATCH]
        texts, scores = _scored(rows, judge)
        if is_first and first == 0 and all(score.outcome is not Outcome.OK for score in scores):
            raise AllExcludedError(
                f"none of the first {len(scores)} given answers could be scored (the first: "
                f"{scores[0].detail or scores[0].outcome.value}): repair the reward function"
            )
        queries = {query.query_id: query for query, _ in rows}
        place = {number: at for at, number in enumerate(queries)}
        log_ref = reference.log_ref(
            [query.prompt_ids for query in queries.values()],
            [answer.tokens for _, answer in rows],
            np.array([place[query.query_id] for query, _ in rows]),
        )
        yield encode(
            [
                _trajectory(query, answer.tokens, text, score, values, temperature)
                for (query, answer), text, score, values in zip(
                    rows, texts, scores, log_ref, strict=True
                )
            ]
        )


def _scored(
    rows: Sequence[tuple[Query, Answer]], judge: SupportsScore | None
) -> tuple[list[str], list[Score]]:
    """Return text and score of each answer; a task has either rewards for all or for none."""
    rewards = [answer.reward for _, answer in rows if answer.reward is not None]
    if rewards:
        texts = [answer.text for _, answer in rows]
        return texts, [Score(Outcome.OK, reward) for reward in rewards]
    assert judge is not None, "where there are examples, somebody searches and is judged"
    return judge.score([query for query, _ in rows], [answer.tokens for _, answer in rows])


def _trajectory(
    query: Query, tokens: Int32, text: str, score: Score, log_ref: Float32, temperature: float
) -> Trajectory:
    return Trajectory(
        query_id=query.query_id,
        prompt_ids=query.prompt_ids,
        tokens=tokens,
        text=text,
        log_mu=log_ref,
        log_ref=log_ref,
        score=score,
        finish_reason=FinishReason.STOP,
        policy_version=0,
        reference_version=0,
        ticket=GIVEN,
        searcher=GIVEN,
        temperature=temperature,
        extras=score.extras,
    )
