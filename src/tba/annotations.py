"""What searchers compute for an objective besides rewards and reference log-probabilities.

An objective asks for it by the name of an input; an *annotator* of that name gives every response
an array of one number a token. What an annotator samples and scores besides is not learned from.

    prefix_reward    the reward of the response, had it ended before each token (SubTB)
    log_ref_stop     the reference's log-probability of ending there (SubTB)
    step_advantage   V(next step) - V(step) for the step each token belongs to, where V is the mean
                     reward of fresh responses from there on (VinePPO)
    log_z_star       log mean exp(r / beta) over fresh responses of the reference to the query, the
                     same number at each token (A*-PO)

Where a reward that an annotator needs cannot be had, the response is left out and counted, as if
its own reward had failed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from tba.config.objectives import AStarPOConfig, ObjectiveConfig, VinePPOConfig
from tba.engines.base import Engine, Sampling
from tba.objectives import load_objective
from tba.policy.reference import Reference
from tba.records import Float32, Int32, Outcome, Query, Response, Score


@dataclass(frozen=True, slots=True)
class Found:
    """One response on its way into the buffer."""

    query: Query
    """What it answers."""
    response: Response
    """What was sampled."""
    score: Score
    """Its own reward."""


Annotation = Float32 | Score
"""An array of shape [token], or the score that failed."""


class SupportsJudging(Protocol):
    """Whatever turns tokens into texts and typed rewards (`tba.searcher.Judge`)."""

    def texts(self, tokens: Sequence[Int32]) -> list[str]:
        """Decode responses."""
        ...

    def score(
        self, queries: Sequence[Query], tokens: Sequence[Int32]
    ) -> tuple[list[str], list[Score]]:
        """Decode and score aligned responses."""
        ...


@dataclass(frozen=True, slots=True)
class SearchTools:
    """What a searcher works with."""

    engine: Engine
    """Samples from the searcher's policy."""
    reference_engine: Engine
    """Samples from the reference."""
    reference: Reference
    """The reference's log-probabilities."""
    judge: SupportsJudging
    """The task's reward."""
    sampling: Sampling
    """How the searcher samples."""
    eos_ids: tuple[int, ...]
    """Tokens that end a response."""
    temperature_range: tuple[float, float] | None = None
    """Where each search batch has a temperature of its own, the range it is drawn from."""


Annotator = Callable[[Sequence[Found], SearchTools, torch.Generator], list[Annotation]]


def annotators(section: ObjectiveConfig) -> dict[str, Annotator]:
    """Return the annotators that an objective needs, by the names of its inputs."""
    objective = load_objective(section)
    named = {*objective.inputs(), *objective.inputs_of_preparation()}
    every: dict[str, Annotator] = {"prefix_reward": prefix_rewards, "log_ref_stop": log_ref_stops}
    if isinstance(section, VinePPOConfig):
        every["step_advantage"] = StepAdvantages(section)
    if isinstance(section, AStarPOConfig):
        every["log_z_star"] = ReferenceLogZ(section)
    return {name: annotator for name, annotator in every.items() if name in named}


def annotation_names(section: ObjectiveConfig) -> tuple[str, ...]:
    """Return what searchers compute besides for an objective, in the order of the buffer."""
    return tuple(annotators(section))


class Annotations:
    """All that an objective wants computed of a searcher's responses; mostly nothing."""

    def __init__(self, wanted: Mapping[str, Annotator], tools: SearchTools) -> None:
        self._wanted = wanted
        self._tools = tools

    def of(
        self, found: Sequence[Found], generator: torch.Generator
    ) -> tuple[list[Score], list[dict[str, Float32]]]:
        """Return each response's score, a failure here included, and its arrays by name."""
        scores = [row.score for row in found]
        extras: list[dict[str, Float32]] = [{} for _ in found]
        for name, annotator in self._wanted.items():
            for at, annotation in enumerate(annotator(found, self._tools, generator)):
                if isinstance(annotation, Score):
                    scores[at] = annotation
                else:
                    extras[at][name] = annotation
        return scores, extras


def prefix_rewards(
    found: Sequence[Found], tools: SearchTools, generator: torch.Generator
) -> list[Annotation]:
    """Score every response as if it had ended before each of its tokens."""
    del generator
    stop = np.array(tools.eos_ids[:1], dtype=np.int32)
    ended = [
        [np.concatenate([row.response.tokens[:at], stop]) for at in range(_length(row))]
        for row in found
    ]
    score = _score_once(
        tools.judge, ((row.query, p) for row, all_ in zip(found, ended, strict=True) for p in all_)
    )
    return [
        _values([score(row.query, tokens) for tokens in prefixes])
        for row, prefixes in zip(found, ended, strict=True)
    ]


def log_ref_stops(
    found: Sequence[Found], tools: SearchTools, generator: torch.Generator
) -> list[Annotation]:
    """Return the reference's log-probability of ending before each token."""
    del generator
    queries = {row.query.query_id: row.query for row in found}
    position = {query_id: at for at, query_id in enumerate(queries)}
    return list(
        tools.reference.log_stop(
            [query.prompt_ids for query in queries.values()],
            [row.response.tokens for row in found],
            np.array([position[row.query.query_id] for row in found]),
            tools.eos_ids,
        )
    )


class StepAdvantages:
    """Monte-Carlo advantages of the steps of a response (VinePPO, Kazemnejad et al., 2410.01679).

    V of the state before a step is the mean reward of fresh responses that go on from there; the
    last step leads to the response's own reward. Equal prefixes of a query share their responses.
    """

    def __init__(self, section: VinePPOConfig) -> None:
        self._rollouts = section.rollouts_per_prefix
        self._separator = section.step_separator

    def __call__(
        self, found: Sequence[Found], tools: SearchTools, generator: torch.Generator
    ) -> list[Annotation]:
        """Return the advantage of each token's step."""
        starts = [self._starts(row.response.tokens, tools) for row in found]
        prefixes = {
            (row.query.query_id, row.response.tokens[:at].tobytes()): (
                row.query,
                row.response.tokens[:at],
            )
            for row, own in zip(found, starts, strict=True)
            for at in own
        }
        value = dict(
            zip(prefixes, self._values(list(prefixes.values()), tools, generator), strict=True)
        )
        return [self._advantages(row, own, value) for row, own in zip(found, starts, strict=True)]

    def _starts(self, tokens: Int32, tools: SearchTools) -> list[int]:
        """Return the position of each step's first token; the first one is 0."""
        if not self._separator:
            return list(range(len(tokens)))
        pieces = tools.judge.texts([tokens[at : at + 1] for at in range(len(tokens) - 1)])
        return [0, *(at + 1 for at, piece in enumerate(pieces) if self._separator in piece)]

    def _values(
        self,
        prefixes: Sequence[tuple[Query, Int32]],
        tools: SearchTools,
        generator: torch.Generator,
    ) -> list[float | Score]:
        """Return the mean reward of fresh responses from each prefix on."""
        asked = [
            replace(query, prompt_ids=np.concatenate([query.prompt_ids, prefix]))
            for query, prefix in prefixes
        ]
        longest = tools.sampling.max_completion_length
        sampling = replace(tools.sampling, samples_per_query=self._rollouts)
        answers = tools.engine.generate(asked, sampling, generator)
        whole = [
            (query, np.concatenate([prefix, response.tokens])[:longest])
            for (query, prefix), responses in zip(prefixes, answers, strict=True)
            for response in responses
        ]
        score = _score_once(tools.judge, whole)
        scores = [score(query, tokens) for query, tokens in whole]
        groups = [scores[at : at + self._rollouts] for at in range(0, len(scores), self._rollouts)]
        return [_mean_reward(group) for group in groups]

    def _advantages(
        self,
        row: Found,
        starts: Sequence[int],
        value_of: Mapping[tuple[int, bytes], float | Score],
    ) -> Annotation:
        tokens = row.response.tokens
        values = [value_of[row.query.query_id, tokens[:at].tobytes()] for at in starts]
        values.append(row.score.reward)
        failed = [value for value in values if isinstance(value, Score)]
        if failed:
            return failed[0]
        gains = np.diff(np.array(values, dtype=np.float32))
        return np.repeat(gains, np.diff([*starts, len(tokens)])).astype(np.float32)


class ReferenceLogZ:
    """log Z(x) estimated from fresh responses of the reference (A*-PO, 2505.20686)."""

    def __init__(self, section: AStarPOConfig) -> None:
        self._samples = section.reference_samples
        self._beta = section.beta.value

    def __call__(
        self, found: Sequence[Found], tools: SearchTools, generator: torch.Generator
    ) -> list[Annotation]:
        """Return the query's estimate at each token."""
        queries = {row.query.query_id: row.query for row in found}
        sampling = replace(tools.sampling, samples_per_query=self._samples)
        answers = tools.reference_engine.generate(list(queries.values()), sampling, generator)
        asked = [
            (query, response.tokens)
            for query, responses in zip(queries.values(), answers, strict=True)
            for response in responses
        ]
        score = _score_once(tools.judge, asked)
        estimates = {
            query.query_id: self._estimate([score(query, r.tokens) for r in responses])
            for query, responses in zip(queries.values(), answers, strict=True)
        }
        return [
            estimate
            if isinstance(estimate := estimates[row.query.query_id], Score)
            else np.full(_length(row), estimate, dtype=np.float32)
            for row in found
        ]

    def _estimate(self, scores: Sequence[Score]) -> float | Score:
        rewards = [score.reward for score in scores if score.outcome is Outcome.OK]
        if not rewards:
            return scores[0]
        scaled = np.array(rewards) / self._beta
        return float(np.logaddexp.reduce(scaled) - np.log(len(scaled)))


def _length(row: Found) -> int:
    return len(row.response.tokens)


def _score_once(
    judge: SupportsJudging, asked: Iterable[tuple[Query, Int32]]
) -> Callable[[Query, Int32], Score]:
    """Score responses, equal ones to a query once, and return the look-up."""
    unique = {(query.query_id, tokens.tobytes()): (query, tokens) for query, tokens in asked}
    queries, tokens = zip(*unique.values(), strict=True)
    found = dict(zip(unique, judge.score(queries, tokens)[1], strict=True))
    return lambda query, tokens: found[query.query_id, tokens.tobytes()]


def _mean_reward(scores: Sequence[Score]) -> float | Score:
    """Return the mean over those that could be scored, or a failure when none could."""
    rewards = [score.reward for score in scores if score.outcome is Outcome.OK]
    return float(np.mean(rewards)) if rewards else scores[0]


def _values(scores: Sequence[Score]) -> Annotation:
    """Return the rewards, or the first failure among them."""
    failed = [score for score in scores if score.outcome is not Outcome.OK]
    return failed[0] if failed else np.array([s.reward for s in scores], dtype=np.float32)
