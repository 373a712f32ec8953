"""Accuracy on held-out queries, and what else is said of a policy from its log-probabilities.

A response whose reward failed counts neither as right nor as wrong: it is left out, and counted.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tba.config import Config
from tba.engines import Engine, Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import AllExcludedError, ConfigError
from tba.given import tokenize_answers
from tba.policy.loading import Policy
from tba.policy.precision import autocast_dtype
from tba.policy.reference import Reference
from tba.records import EvalReport, Float32, Int32, Int64, Outcome, Query, Response, Score
from tba.reference_answers import ReferenceAnswers
from tba.tasks.base import Answered, Task

HOPELESS_AFTER = 32
"""Failures, and no success, after which the rest need not be asked."""


class Scorer(Protocol):
    """Rewards responses."""

    def score(
        self, queries: Sequence[Query], texts: Sequence[str], tokens: Sequence[Int32]
    ) -> list[Score]:
        """Score one response for each entry of `queries`, in order; a failure is an outcome."""
        ...


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Answers:
    """How a policy answered some queries, and how right it was."""

    answered: Answered
    """The responses, those to the first query first."""
    queries: int
    """Queries asked."""
    query_of: Int64
    """Position of each response's query; shape [response]."""
    pass_threshold: float | None
    """Reward from which a response is right; None where the task knows no right and wrong."""

    @property
    def response_tokens(self) -> int:
        """Tokens of all responses together, end-of-sequence tokens included."""
        return sum(len(response.tokens) for response in self.answered.responses)

    @property
    def failures(self) -> list[str]:
        """What happened to each response whose reward failed."""
        failed = (s for s in self.answered.scores if s.outcome is not Outcome.OK)
        return [score.detail or score.outcome.value for score in failed]

    def measured(self, task: Task, reference_texts: Sequence[str] | None) -> dict[str, float]:
        """Return the mean reward and what the task's measures tell, by name."""
        answered = dataclasses.replace(self.answered, reference_texts=reference_texts)
        found = {"reward": self.mean_reward()}
        for measure in task.measures:
            found |= measure(answered)
        return found

    def mean_reward(self) -> float:
        """Return the mean raw reward of the responses that have one."""
        rewards = self._rewards()
        if np.isnan(rewards).all():
            raise self._nothing("the mean reward", "no response could be scored")
        return float(np.nanmean(rewards))

    def pass_at(self, k: int) -> float | None:
        """Return the mean unbiased pass@k over the queries that have k scored responses or more.

        None where the task knows no right and wrong.
        """
        if self.pass_threshold is None:
            return None
        rewards = self._rewards()
        scored = np.bincount(self.query_of, ~np.isnan(rewards), minlength=self.queries)
        right = rewards >= self.pass_threshold  # NaN compares false
        correct = np.bincount(self.query_of, right, minlength=self.queries)
        enough = scored >= k
        if not enough.any():
            raise self._nothing(f"pass@{k}", f"no query has {k} scored responses")
        pairs = zip(scored[enough], correct[enough], strict=True)
        return float(np.mean([pass_at_k(int(n), int(c), k) for n, c in pairs]))

    def _rewards(self) -> NDArray[np.float64]:
        """Return raw rewards, NaN for those that failed; shape [response]."""
        return np.array([score.reward for score in self.answered.scores], dtype=np.float64)

    def _nothing(self, what: str, why: str) -> AllExcludedError:
        failures = self.failures
        return AllExcludedError(
            f"{what} cannot be told because {why} ({len(failures)} were excluded, the first with: "
            f"{failures[0] if failures else 'none'}): sample more responses or repair the reward "
            "function"
        )


def evaluate(
    engine: Engine,
    scorer: Scorer,
    *,
    task: Task,
    tokenizer: Decoder,
    config: Config,
    policy_version: int,
    reference: ReferenceAnswers | None = None,
) -> EvalReport:
    """Measure a policy on the task's first held-out queries: reward, pass@1, the task's measures.

    Random numbers depend on the seed alone, so that before and after are asked with the same ones.

    Args:
        engine: Holds the policy.
        scorer: Gives the task's rewards.
        task: Its held-out queries are asked.
        tokenizer: The policy's.
        config: Says how many queries, and how responses are sampled.
        policy_version: Optimiser steps behind the policy; 0 is the initial model.
        reference: Where the initial model's answers are kept, for measures that compare with them.

    Raises:
        AllExcludedError: no response could be scored.
    """
    start = time.perf_counter()
    sampled, greedy = ask(engine, scorer, task=task, tokenizer=tokenizer, config=config)
    texts = None
    if task.compares_with_reference and reference is not None:
        texts = reference.compared_with(sampled.answered, policy_version)
    measured = sampled.measured(task, texts)
    return EvalReport(
        policy_version=policy_version,
        queries=sampled.queries,
        sampled_pass_at_1=sampled.pass_at(1),
        greedy_pass_at_1=greedy.pass_at(1) if greedy else None,
        mean_response_tokens=sampled.response_tokens / sampled.queries,
        excluded=len(sampled.failures) + (len(greedy.failures) if greedy else 0),
        seconds=time.perf_counter() - start,
        measured=measured,
    )


def evaluate_policy(
    policy: Policy,
    scorer: Scorer | None,
    *,
    task: Task,
    config: Config,
    policy_version: int,
    reference: ReferenceAnswers | None = None,
) -> EvalReport | None:
    """Measure a policy on held-out queries: its responses where they can be scored, its loss.

    Where the initial model's answers are kept, measures compare with them; see `evaluate`.

    Returns:
        None where there is neither a scorer nor a held-out demonstration.
    """
    start = time.perf_counter()
    loss = demonstration_loss(policy, task, config)
    if loss is None and scorer is None:
        return None
    if scorer is not None:
        report = _of_responses(
            policy, scorer, task=task, config=config, version=policy_version, reference=reference
        )
    else:
        asked = len(task.test[: config.evaluation.queries])
        report = EvalReport(policy_version, asked, None, None, None, excluded=0, seconds=0.0)
    measured = report.measured if loss is None else {**report.measured, "loss": loss}
    return dataclasses.replace(report, measured=measured, seconds=time.perf_counter() - start)


def demonstration_loss(policy: Policy, task: Task, config: Config) -> float | None:
    """Return the mean of -log pi over the tokens of the held-out demonstrations, in nats.

    End-of-sequence tokens count, and there is no temperature. It is that of the held-out queries
    which an evaluation asks, as far as they have a demonstration that is not too long; None where
    none has, or demonstrations are not what the run is given.
    """
    texts = (task.test_demonstrations or ())[: config.evaluation.queries]
    shown = [i for i, text in enumerate(texts) if text is not None]
    if config.buffer.given != "demonstrations" or not shown:
        return None
    answers = tokenize_answers([text for text in texts if text is not None], policy)
    pairs = [
        (task.test[i].prompt_ids, answer.tokens)
        for i, answer in zip(shown, answers, strict=True)
        if len(answer.tokens) <= config.search.max_completion_length
    ]
    if not pairs:
        return None
    tokens = config.trainer.micro_batch_tokens
    log_pi = Reference(policy.model, temperature=1.0, micro_batch_tokens=tokens).log_ref(
        [prompt for prompt, _ in pairs], [answer for _, answer in pairs], np.arange(len(pairs))
    )
    return -float(np.concatenate(log_pi).mean(dtype=np.float64))


def _of_responses(
    policy: Policy,
    scorer: Scorer,
    *,
    task: Task,
    config: Config,
    version: int,
    reference: ReferenceAnswers | None,
) -> EvalReport:
    """Generate in the trainer's precision, and score."""
    model = policy.model
    low = autocast_dtype(config.trainer.precision, model)
    with torch.autocast(model.device.type, low, enabled=low is not None):
        return evaluate(
            TorchEngine(model, policy.eos_ids),
            scorer,
            task=task,
            tokenizer=policy.tokenizer,
            config=config,
            policy_version=version,
            reference=reference,
        )


def ask(
    engine: Engine,
    scorer: Scorer,
    *,
    task: Task,
    tokenizer: Decoder,
    config: Config,
    samples: int = 1,
) -> tuple[Answers, Answers | None]:
    """Ask the task's first held-out queries, as many as the configuration says.

    Returns:
        `samples` responses to each at the search temperature; and the likeliest one to each, token
        by token, or None where the task knows no right and wrong.
    """
    asked = partial(
        answers,
        engine,
        scorer,
        queries=task.test[: config.evaluation.queries],
        tokenizer=tokenizer,
        pass_threshold=task.pass_threshold,
        queries_per_batch=max(1, config.evaluation.queries_per_batch // samples),
        seed=config.seed,
    )
    length = config.search.max_completion_length
    sampled = asked(sampling=Sampling(samples, config.search.temperature, length))
    if task.pass_threshold is None:
        return sampled, None
    return sampled, asked(sampling=Sampling(1, 0.0, length))


def answers(
    engine: Engine,
    scorer: Scorer,
    *,
    queries: Sequence[Query],
    tokenizer: Decoder,
    pass_threshold: float | None,
    sampling: Sampling,
    queries_per_batch: int,
    seed: int,
) -> Answers:
    """Ask every query, a batch at a time, and score the answers.

    Each batch has a random stream of its own, so that a policy which answers one batch at greater
    length meets the same random numbers in the next.
    """
    asked: list[int] = []
    found: list[Response] = []
    texts: list[str] = []
    scores: list[Score] = []
    for owners, responses in _batches(engine, queries, sampling, queries_per_batch, seed):
        tokens = [response.tokens for response in responses]
        own = _texts(tokenizer, responses)
        scores += scorer.score([queries[i] for i in owners], own, tokens)
        asked += owners
        found += responses
        texts += own
        if len(scores) >= HOPELESS_AFTER and all(s.outcome is not Outcome.OK for s in scores):
            raise AllExcludedError(
                f"none of the first {len(scores)} responses could be scored (the first: "
                f"{scores[0].detail or scores[0].outcome.value}): repair the reward function"
            )
    return Answers(
        answered=Answered([queries[i] for i in asked], found, texts, scores),
        queries=len(queries),
        query_of=np.array(asked, dtype=np.int64),
        pass_threshold=pass_threshold,
    )


def sampled_texts(
    engine: Engine,
    *,
    queries: Sequence[Query],
    tokenizer: Decoder,
    sampling: Sampling,
    queries_per_batch: int,
    seed: int,
) -> list[str]:
    """Ask as `answers` does, with the same random numbers, and return the texts alone."""
    batches = _batches(engine, queries, sampling, queries_per_batch, seed)
    return [text for _, responses in batches for text in _texts(tokenizer, responses)]


def _batches(
    engine: Engine, queries: Sequence[Query], sampling: Sampling, queries_per_batch: int, seed: int
) -> Iterator[tuple[list[int], list[Response]]]:
    """Yield responses and the position of the query that each one answers, a batch at a time."""
    for first in range(0, len(queries), queries_per_batch):
        batch = queries[first : first + queries_per_batch]
        found = engine.generate(batch, sampling, _generator(seed, first))
        yield (
            [first + i for i, of_query in enumerate(found) for _ in of_query],
            [response for of_query in found for response in of_query],
        )


def _texts(tokenizer: Decoder, responses: Sequence[Response]) -> list[str]:
    return [tokenizer.decode(r.tokens.tolist(), skip_special_tokens=True) for r in responses]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the chance that one of k samples is right, c of n samples being so.

    1 - C(n - c, k) / C(n, k), as a product that does not overflow (Chen et al., 2107.03374).
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ConfigError(
            f"pass@{k} cannot be told from {samples} samples of which {correct} are right: "
            "give at least k samples of each query"
        )
    if samples - correct < k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(samples - correct + 1, samples + 1)))


def perplexity(log_probs: Sequence[Float32]) -> float:
    """Return exp(-sum of log p / number of response tokens), the end-of-sequence tokens counted.

    Each array holds the log-probabilities of one response, shape [token]; the prompt has no part
    in it.
    """
    total = sum(float(response.sum(dtype=np.float64)) for response in log_probs)
    return float(np.exp(-total / sum(len(response) for response in log_probs)))


def paper_perplexity(log_probs: Sequence[Float32], prompt_tokens: Sequence[int]) -> float:
    """Return what the paper's public code calls perplexity, to compare with its figures alone.

    exp of the mean over responses of -sum of log p / (prompt + response tokens): the prompt counts
    in the denominator, though its own log-probabilities are not in the sum.

    Args:
        log_probs: Of each response's tokens, shape [token].
        prompt_tokens: Length of each response's prompt.
    """
    pairs = zip(log_probs, prompt_tokens, strict=True)
    mean = np.mean([-float(own.sum(dtype=np.float64)) / (len(own) + n) for own, n in pairs])
    return float(np.exp(mean))


def kl_to_reference(log_pi: Sequence[Float32], log_ref: Sequence[Float32]) -> float:
    """Estimate KL(pi || ref) in nats a response from responses sampled from pi.

    The mean over responses of log pi(y|x) - log ref(y|x); each array has the shape [token].
    """
    pairs = zip(log_pi, log_ref, strict=True)
    return float(np.mean([float((pi.astype(np.float64) - ref).sum()) for pi, ref in pairs]))


def _generator(seed: int, batch: int) -> torch.Generator:
    stream = np.random.SeedSequence([seed, batch]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(stream[0] >> 1))
