"""Accuracy on held-out queries, and what else is said of a policy from its log-probabilities.

A response whose reward failed counts neither as right nor as wrong: it is left out, and counted.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tba.config import EvaluationConfig
from tba.engines import Engine, Sampling
from tba.errors import AllExcludedError, ConfigError
from tba.records import EvalReport, Float32, Int32, Int64, Outcome, Query, Score
from tba.tasks.base import Task

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
    """How a policy answered some queries."""

    scored: Int64
    """Responses with a reward, n; shape [query]."""
    correct: Int64
    """Of which right, c; shape [query]."""
    response_tokens: int
    """Tokens of all responses together, end-of-sequence tokens included."""
    excluded: int
    """Responses whose reward failed."""
    failure: str
    """What happened to the first of those."""

    def pass_at(self, k: int) -> float:
        """Return the mean unbiased pass@k over the queries that have k scored responses or more."""
        enough = self.scored >= k
        if not enough.any():
            raise AllExcludedError(
                f"pass@{k} cannot be told because no query has {k} scored responses "
                f"({self.excluded} were excluded, the first with: {self.failure or 'none'}): "
                "sample more responses or repair the reward function"
            )
        pairs = zip(self.scored[enough], self.correct[enough], strict=True)
        return float(np.mean([pass_at_k(int(n), int(c), k) for n, c in pairs]))


def evaluate(
    engine: Engine,
    scorer: Scorer,
    *,
    task: Task,
    tokenizer: Decoder,
    sampling: Sampling,
    settings: EvaluationConfig,
    seed: int,
    policy_version: int,
) -> EvalReport:
    """Measure sampled and greedy pass@1 on the task's first held-out queries.

    Random numbers depend on `seed` alone, so that before and after are asked with the same ones.

    Raises:
        AllExcludedError: no response could be scored.
    """
    start = time.perf_counter()
    queries = task.test[: settings.queries]

    def asked(temperature: float) -> Answers:
        return answers(
            engine,
            scorer,
            queries=queries,
            tokenizer=tokenizer,
            pass_threshold=task.pass_threshold,
            sampling=dataclasses.replace(sampling, samples_per_query=1, temperature=temperature),
            queries_per_batch=settings.queries_per_batch,
            seed=seed,
        )

    sampled = asked(sampling.temperature)
    greedy = asked(0.0)
    return EvalReport(
        policy_version=policy_version,
        queries=len(queries),
        sampled_pass_at_1=sampled.pass_at(1),
        greedy_pass_at_1=greedy.pass_at(1),
        mean_response_tokens=sampled.response_tokens / len(queries),
        excluded=sampled.excluded + greedy.excluded,
        seconds=time.perf_counter() - start,
    )


def answers(
    engine: Engine,
    scorer: Scorer,
    *,
    queries: Sequence[Query],
    tokenizer: Decoder,
    pass_threshold: float,
    sampling: Sampling,
    queries_per_batch: int,
    seed: int,
) -> Answers:
    """Ask every query, a batch at a time, and count right answers.

    Each batch has a random stream of its own, so that a policy which answers one batch at greater
    length meets the same random numbers in the next.
    """
    counts = np.zeros((2, len(queries)), dtype=np.int64)  # [scored or correct, query]
    response_tokens, failures = 0, []
    for first in range(0, len(queries), queries_per_batch):
        batch = queries[first : first + queries_per_batch]
        responses = engine.generate(batch, sampling, _generator(seed, first))
        owners = [i for i, of_query in enumerate(responses) for _ in of_query]
        tokens = [response.tokens for of_query in responses for response in of_query]
        texts = [tokenizer.decode(t.tolist(), skip_special_tokens=True) for t in tokens]
        scores = scorer.score([batch[i] for i in owners], texts, tokens)
        for i, score in zip(owners, scores, strict=True):
            if score.outcome is Outcome.OK:
                counts[:, first + i] += 1, score.reward >= pass_threshold
            else:
                failures.append(score.detail or score.outcome.value)
        response_tokens += sum(len(t) for t in tokens)
        if len(failures) >= HOPELESS_AFTER and not counts[0].any():
            raise AllExcludedError(
                f"none of the first {len(failures)} responses could be scored (the first: "
                f"{failures[0]}): repair the reward function"
            )
    return Answers(
        scored=counts[0],
        correct=counts[1],
        response_tokens=response_tokens,
        excluded=len(failures),
        failure=failures[0] if failures else "",
    )


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


def kl_to_reference(log_pi: Sequence[Float32], log_ref: Sequence[Float32]) -> float:
    """Estimate KL(pi || ref) in nats a response from responses sampled from pi.

    The mean over responses of log pi(y|x) - log ref(y|x); each array has the shape [token].
    """
    pairs = zip(log_pi, log_ref, strict=True)
    return float(np.mean([float((pi.astype(np.float64) - ref).sum()) for pi, ref in pairs]))


def _generator(seed: int, batch: int) -> torch.Generator:
    stream = np.random.SeedSequence([seed, batch]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(stream[0] >> 1))
