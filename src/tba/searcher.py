"""The searcher's box of the algorithm (`algorithm.md` section 2).

    Searcher, forever:
      S1. if newer weights are there, take them
      S2. take the next queries
      S3. y_1..y_S ~ pi_theta'(.|x)
      S4. score: r_j = reward(y_j; x); log pi_ref(y_j|x); what the objective needs besides
      S5. add (x, y_j, r_j, log pi_ref, policy version) to D_local
      A3C alone: the gradient of these goes to the trainer (`tba.actor_learner`)

`Searcher.search` is one round of S1 to S5. When D_local goes to D_global is the turn-taking of
`tba.pace`; how it gets there is the runtime's.

A search batch has a number, its *ticket*, unique within a run. The ticket alone decides which
queries are taken and which random stream samples them, so two searchers never share a stream, a
replaced searcher repeats nothing, and a resumed run goes on where it was.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch

from tba.actor_learner import ActorLearner
from tba.annotations import Annotations, Found, SearchTools
from tba.records import Batch, Float32, Int32, Query, Response, Score, Trajectory
from tba.sync import NOTHING_PUBLISHED, WeightStore


class SupportsScore(Protocol):
    """Whatever turns responses into typed rewards (`tba.tasks.scoring.Scorer`)."""

    def score(
        self, queries: Sequence[Query], texts: Sequence[str], tokens: Sequence[Int32]
    ) -> list[Score]:
        """Score aligned queries and responses."""
        ...


class SupportsDecode(Protocol):
    """The part of a tokenizer that searching needs."""

    def batch_decode(self, sequences: Sequence[Int32], *, skip_special_tokens: bool) -> list[str]:
        """Turn tokens into texts."""
        ...


class Judge:
    """Decodes responses and scores the texts."""

    def __init__(self, scorer: SupportsScore, tokenizer: SupportsDecode) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer

    def texts(self, tokens: Sequence[Int32]) -> list[str]:
        """Decode responses, special tokens left out."""
        return self._tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def score(
        self, queries: Sequence[Query], tokens: Sequence[Int32]
    ) -> tuple[list[str], list[Score]]:
        """Decode and score aligned responses."""
        texts = self.texts(tokens)
        return texts, self._scorer.score(queries, texts, tokens)


def stream_seed(seed: int, purpose: str, number: int) -> int:
    """Return the 63-bit seed of one random stream, a hash of the three."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Tickets:
    """What a search batch is made of: its queries, in a new order each epoch, and its stream."""

    def __init__(self, queries: Sequence[Query], per_batch: int, seed: int) -> None:
        self._queries = queries
        self._per_batch = per_batch
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, permutation)

    def take(self, ticket: int) -> list[Query]:
        """Return the distinct queries of a ticket: `per_batch`, or fewer where an epoch ends."""
        first = ticket * self._per_batch
        ids = [self._id_at(position) for position in range(first, first + self._per_batch)]
        return [self._queries[i] for i in dict.fromkeys(ids)]

    def generator(self, ticket: int) -> torch.Generator:
        """Return the random stream that samples a ticket's responses."""
        return torch.Generator().manual_seed(stream_seed(self._seed, "search", ticket))

    def temperature(self, ticket: int, between: tuple[float, float]) -> float:
        """Return the temperature of a ticket's responses, drawn uniformly from a range."""
        generator = np.random.default_rng(stream_seed(self._seed, "temperature", ticket))
        return float(generator.uniform(*between))

    def second_generator(self, ticket: int) -> torch.Generator:
        """Return the random stream for what is sampled besides a ticket's responses."""
        return torch.Generator().manual_seed(stream_seed(self._seed, "annotate", ticket))

    def _id_at(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._queries))
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng(stream_seed(self._seed, "epoch", epoch))
            self._order = (epoch, generator.permutation(len(self._queries)))
        return int(self._order[1][offset])


class Stage(StrEnum):
    """What a searcher is doing; the watchdog names it."""

    LOADING = "loading models and task"
    WAITING = "waiting for a round to open"
    TAKING_WEIGHTS = "taking weights"
    GENERATING = "generating"
    SCORING = "scoring responses"
    REFERENCE = "computing reference log-probabilities"
    LEARNING = "computing a gradient"
    SENDING = "waiting for the trainer to take a gradient"
    DELIVERING = "delivering trajectories"


@dataclass(frozen=True, slots=True)
class Seat:
    """Which searcher this is, and whom it tells what it is doing."""

    lane: int
    """Number of its lane."""
    announce: Callable[[Stage], None]
    """Called at the start of each stage."""
    send: Callable[[Batch], None]
    """Takes a batch with its gradient, where searchers send gradients; may block until the trainer
    has taken earlier ones."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The weights' wires as a searcher sees them."""

    policy: WeightStore
    """Weights of the trainer's policy."""
    reference: WeightStore | None
    """Weights of the reference, where it is reset during the run."""


class Searcher:
    """Finds responses with slightly stale weights."""

    def __init__(
        self,
        tools: SearchTools,
        annotations: Annotations,
        *,
        learner: ActorLearner | None,
        tickets: Tickets,
        stores: Stores,
        seat: Seat,
    ) -> None:
        self._engine = tools.engine
        self._reference = tools.reference
        self._judge = tools.judge
        self._sampling = tools.sampling
        self._temperatures = tools.temperature_range
        self._annotations = annotations
        self._learner = learner
        self._tickets = tickets
        self._stores = stores
        self._seat = seat
        self._policy_version = NOTHING_PUBLISHED
        self._reference_version = 0

    def search(self, ticket: int) -> list[Trajectory]:
        """Return the scored responses of one search batch."""
        self._seat.announce(Stage.TAKING_WEIGHTS)
        self._take_weights()  # S1
        assert self._policy_version != NOTHING_PUBLISHED, "weights are published before searchers"
        queries = self._tickets.take(ticket)  # S2
        self._seat.announce(Stage.GENERATING)
        sampling = self._sampling
        if self._temperatures is not None:
            drawn = self._tickets.temperature(ticket, self._temperatures)
            sampling = replace(sampling, temperature=drawn)
        responses = self._engine.generate(queries, sampling, self._tickets.generator(ticket))  # S3
        found = [
            replace(trajectory, temperature=sampling.temperature)
            for trajectory in self._score(queries, responses, ticket)  # S4, S5
        ]
        if self._learner is not None:
            self._send_gradient(self._learner, found)
        return found

    def _take_weights(self) -> None:
        weights = self._learner.weights() if self._learner else self._engine.weights()
        version = self._stores.policy.pull(weights, newer_than=self._policy_version)
        if version is not None:
            self._policy_version = version
            self._engine.refresh()
        if self._stores.reference is not None:
            version = self._stores.reference.pull(
                self._reference.weights(), newer_than=self._reference_version
            )
            if version is not None:
                self._reference_version = version

    def _send_gradient(self, learner: ActorLearner, found: Sequence[Trajectory]) -> None:
        self._seat.announce(Stage.LEARNING)
        batch = learner.learn(found)
        if batch is not None:
            self._seat.announce(Stage.SENDING)
            self._seat.send(batch)

    def _score(
        self, queries: Sequence[Query], responses: Sequence[Sequence[Response]], ticket: int
    ) -> list[Trajectory]:
        flat = [(query, r) for query, group in zip(queries, responses, strict=True) for r in group]
        tokens = [response.tokens for _, response in flat]
        self._seat.announce(Stage.SCORING)
        texts, scores = self._judge.score([query for query, _ in flat], tokens)
        found = [Found(*pair, score) for pair, score in zip(flat, scores, strict=True)]
        scores, extras = self._annotations.of(found, self._tickets.second_generator(ticket))
        self._seat.announce(Stage.REFERENCE)
        log_ref = self._log_ref(queries, responses)
        return [
            Trajectory(
                query_id=query.query_id,
                prompt_ids=query.prompt_ids,
                tokens=response.tokens,
                text=texts[row],
                log_mu=response.log_mu,
                log_ref=log_ref[row],
                score=scores[row],
                finish_reason=response.finish_reason,
                policy_version=self._policy_version,
                reference_version=self._reference_version,
                ticket=ticket,
                searcher=self._seat.lane,
                temperature=self._sampling.temperature,
                extras={**scores[row].extras, **extras[row]},
            )
            for row, (query, response) in enumerate(flat)
        ]

    def _log_ref(
        self, queries: Sequence[Query], responses: Sequence[Sequence[Response]]
    ) -> list[Float32]:
        """Return the responses' reference log-probabilities, computing equal ones once."""
        keys = [(q, r.tokens.tobytes()) for q, group in enumerate(responses) for r in group]
        flat = [response.tokens for group in responses for response in group]
        first = {key: row for row, key in reversed(list(enumerate(keys)))}
        unique = sorted(first.values())
        found = self._reference.log_ref(
            [query.prompt_ids for query in queries],
            [flat[row] for row in unique],
            np.array([keys[row][0] for row in unique]),
        )
        log_ref_of = dict(zip(unique, found, strict=True))
        return [log_ref_of[first[key]] for key in keys]
