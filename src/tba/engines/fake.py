"""A scripted engine, so that searchers and trainers can be tested without a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tba.engines.base import Sampling
from tba.records import FinishReason, Query, Response

Script = Callable[[Query, int], Sequence[int]]
"""Tokens of the answer to a query, by sample number 0 .. S-1."""


@dataclass(frozen=True, slots=True)
class FakeCall:
    """One call of `generate`, as a `FakeEngine` remembers it."""

    query_ids: tuple[int, ...]
    """The queries asked."""
    sampling: Sampling
    """How they were to be answered."""
    random_number: int
    """The first number of the generator it was given."""


class FakeEngine:
    """Answers each sample of each query from a script; keeps every invariant of `Engine`.

    Answers end at their first end-of-sequence token and at the maximum completion length. A call
    draws one number from the generator and keeps it in `calls`, so that tests can tell random
    streams apart.
    """

    def __init__(
        self,
        script: Script | Mapping[int, Sequence[Sequence[int]]],
        *,
        eos_token_id: int,
        log_mu: Callable[[Query, int], Sequence[float]] | float = -1.0,
        greedy: Script | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Script the engine.

        Args:
            script: a function, or a table from query id to answers, which are repeated in turn.
            eos_token_id: the end-of-sequence token.
            log_mu: log-probabilities of each answer's tokens, or one for every token.
            greedy: answers at temperature 0; the script's by default.
            weights: live parameters; none by default.
        """
        self._script = script if callable(script) else _from_table(script)
        self._greedy = greedy or self._script
        self._eos_token_id = eos_token_id
        self._log_mu = log_mu
        self._weights = weights or {}
        self.calls: list[FakeCall] = []

    def generate(
        self, queries: Sequence[Query], sampling: Sampling, generator: torch.Generator
    ) -> list[list[Response]]:
        """Answer from the script."""
        number = int(
            torch.randint(
                2**62, (), generator=generator, device=generator.device, dtype=torch.int64
            )
        )
        self.calls.append(FakeCall(tuple(q.query_id for q in queries), sampling, number))
        return [
            [
                self._response(query, sample, sampling)
                for sample in range(sampling.samples_per_query)
            ]
            for query in queries
        ]

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters it was given."""
        return self._weights

    def refresh(self) -> None:
        """Do nothing: there is no other form of the parameters."""

    def _response(self, query: Query, sample: int, sampling: Sampling) -> Response:
        script = self._script if sampling.temperature > 0 else self._greedy
        tokens = list(script(query, sample))[: sampling.max_completion_length]
        finished = self._eos_token_id in tokens
        if finished:
            tokens = tokens[: tokens.index(self._eos_token_id) + 1]
        log_mu = (
            self._log_mu(query, sample)[: len(tokens)]
            if callable(self._log_mu)
            else [self._log_mu] * len(tokens)
        )
        assert len(log_mu) == len(tokens), "a script gives one log-probability for each token"
        return Response(
            tokens=np.array(tokens, dtype=np.int32),
            log_mu=np.array(log_mu, dtype=np.float32),
            finish_reason=FinishReason.STOP if finished else FinishReason.LENGTH,
        )


def _from_table(table: Mapping[int, Sequence[Sequence[int]]]) -> Script:
    def script(query: Query, sample: int) -> Sequence[int]:
        answers = table[query.query_id]
        return answers[sample % len(answers)]

    return script
