"""How a batch is drawn from the buffer: the trainer's first line of the algorithm.

B times: with probability m, drawn per query, a query of the most recent sync and K of its newest
samples, uniformly; otherwise any query ever seen and K of its samples, by softmax of the reward or
uniformly. Without replacement; where fewer than K unique samples exist, each is there as often as
it was found, and only where that is too little as well, with replacement. The queries of a batch
differ as long as there are enough of them; on request, such as teach something are preferred.

Where nobody searches, what is in the buffer was given and stays, and a batch is drawn in epochs.

Samples beyond `max_staleness` or `max_reuse` are passed over as if they were not there. When none
of the recent queries has a recent sample left, the m branch draws as the other one does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.buffer import ReplayBuffer
from tba.config.search import BufferConfig
from tba.records import Batch, Float32, Int64

_MOST_PASSED_OVER = 8
"""Queries with equal rewards that are passed over for each one to be picked, at most: looking for
others takes time, too."""


def draw_batch(
    buffer: ReplayBuffer,
    *,
    queries_per_batch: int,
    samples_per_query: int,
    trainer_version: int,
    config: BufferConfig,
    generator: np.random.Generator,
) -> Batch | None:
    """Draw B queries with K samples each and count the use; None when nothing may be drawn."""
    on_policy = generator.random(queries_per_batch) < config.on_policy_prob
    bounds = _Bounds(buffer, trainer_version, config)
    recent = buffer.recent(config.recent_versions)

    worth = bounds.worth(recent.oldest_version)
    fresh = _pick(recent, int(on_policy.sum()), worth, [], generator)
    on_policy &= bool(fresh)
    other = _pick(bounds.queries(), int((~on_policy).sum()), bounds.worth(None), fresh, generator)
    if not fresh and not other:
        return None
    numbers = np.empty(queries_per_batch, dtype=np.int64)
    numbers[on_policy], numbers[~on_policy] = fresh, other

    draws = []
    for number, newest in zip(numbers.tolist(), on_policy, strict=True):
        slots = bounds.samples(number)
        found = buffer.field("found", slots)
        if newest:
            chosen = choose_newest(
                buffer.field("policy_version", slots),
                found,
                samples_per_query,
                recent_from=recent.oldest_version,
                generator=generator,
            )
        else:
            logits = _off_policy_logits(buffer.field("reward", slots), config)
            chosen = choose_by_softmax(logits, found, samples_per_query, generator)
        draws.append(slots[chosen])
    batch = assemble(buffer, numbers, np.stack(draws), on_policy)
    buffer.count_use(batch.slots)
    return batch


def draw_in_epochs(
    buffer: ReplayBuffer,
    *,
    queries_per_batch: int,
    samples_per_query: int,
    max_reuse: int | None,
    generator: np.random.Generator,
) -> Batch | None:
    """Draw B of the queries that were drawn least, and count the use; None when all are used up.

    So no query is drawn again before every other one was, and each epoch has an order of its own.
    A query repeats in a batch only where there are fewer than B. K samples of each are drawn
    uniformly.

    Args:
        buffer: Nothing is added to it between batches.
        queries_per_batch: B.
        samples_per_query: K.
        max_reuse: Batches in which a query may be drawn; None: any number.
        generator: The order within an epoch.
    """
    uses = buffer.least_uses
    order = uses + generator.random(len(uses))  # by epoch, then at random
    candidates = np.arange(len(uses)) if max_reuse is None else np.flatnonzero(uses < max_reuse)
    if not len(candidates):
        return None
    count = min(queries_per_batch, len(candidates))
    first = candidates[np.argpartition(order[candidates], count - 1)[:count]]
    numbers = np.resize(first[np.argsort(order[first])], queries_per_batch)
    draws = []
    for number in numbers.tolist():
        slots = buffer.samples(number)
        found = buffer.field("found", slots)
        equal = np.zeros(len(slots))
        draws.append(slots[choose_by_softmax(equal, found, samples_per_query, generator)])
    nobody = np.zeros(queries_per_batch, dtype=np.bool_)
    batch = assemble(buffer, numbers, np.stack(draws), on_policy=nobody)
    buffer.count_use(batch.slots)
    return batch


def choose_newest(
    version: NDArray[Any],
    found: NDArray[Any],
    count: int,
    *,
    recent_from: int,
    generator: np.random.Generator,
) -> Int64:
    """Choose positions: `count` of those with a recent version, uniformly.

    When there are not `count` of them: from `_finds`, with replacement only if these are too few.
    Older samples are the other branch's, so that staleness here is bounded.
    """
    recent = np.flatnonzero(version >= recent_from)
    if len(recent) < count:
        recent = _finds(recent, found)
    return generator.choice(recent, count, replace=len(recent) < count)


def choose_by_softmax(
    logits: NDArray[np.float64],
    found: NDArray[Any],
    count: int,
    generator: np.random.Generator,
) -> Int64:
    """Choose `count` positions by softmax without replacement; equal logits choose uniformly.

    The largest of logit + Gumbel noise are such a sample (Kool et al. 2019), and no exponential is
    taken, so nothing underflows; equal logits that swallow the noise, or are -inf, are ordered by
    the noise alone. When there are not `count`: from `_finds`, with replacement only if these are
    too few.
    """
    positions = np.arange(len(logits))
    if len(positions) < count:
        positions = _finds(positions, found)
    if len(positions) >= count:
        return positions[_noisy_order(logits[positions], generator)[:count]]
    repeats = [_noisy_order(logits[positions], generator)[0] for _ in range(count)]
    return positions[repeats]


def _finds(positions: Int64, found: NDArray[Any]) -> Int64:
    """Return each position as often as it was found, as if duplicates had not been merged."""
    return np.repeat(positions, found[positions])


def _off_policy_logits(reward: Float32, config: BufferConfig) -> NDArray[np.float64]:
    """Return the logits of the branch that may take any sample of a query."""
    if config.off_policy_sampling == "softmax_reward":
        return reward.astype(np.float64) / config.reward_temperature
    return np.zeros(len(reward))


def _noisy_order(logits: NDArray[np.float64], generator: np.random.Generator) -> Int64:
    """Order positions by logit + Gumbel noise, largest first."""
    noise = generator.gumbel(size=len(logits))
    return np.lexsort((noise, logits + noise))[::-1]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What `max_staleness` and `max_reuse` leave of the buffer."""

    buffer: ReplayBuffer
    trainer_version: int
    config: BufferConfig

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that may be drawn."""
        bound = self.config.max_staleness
        return None if bound is None else self.trainer_version - bound

    def queries(self) -> Sequence[int] | Int64:
        """Return the queries that may have drawable samples."""
        return self.buffer.eligible(self.oldest_version, self.config.max_reuse)

    def samples(self, number: int) -> NDArray[Any]:
        """Return a query's drawable slots, newest last."""
        slots = self.buffer.samples(number)
        if self.oldest_version is not None:
            slots = slots[self.buffer.field("policy_version", slots) >= self.oldest_version]
        if self.config.max_reuse is not None:
            slots = slots[self.buffer.field("uses", slots) < self.config.max_reuse]
        return slots

    def worth(self, since: int | None) -> Callable[[int], "_Worth"]:
        """Return what drawing a query is worth, if its samples are of this version or newer."""

        def of(number: int) -> _Worth:
            slots = self.samples(number)
            if since is not None:
                slots = slots[self.buffer.field("policy_version", slots) >= since]
            if len(slots) == 0:
                return _Worth.NOTHING
            if self.config.skip_equal_rewards and _all_equal(self.buffer.field("reward", slots)):
                return _Worth.LITTLE
            return _Worth.MUCH

        return of


def _all_equal(rewards: Float32) -> bool:
    return bool((rewards == rewards[0]).all())


class _Worth(Enum):
    """What drawing a query is worth."""

    NOTHING = auto()
    """It has no drawable sample."""
    LITTLE = auto()
    """Its samples have equal rewards, and such queries are to be passed over."""
    MUCH = auto()
    """It is to be drawn."""


def _pick(
    candidates: Sequence[int] | Int64,
    count: int,
    worth: Callable[[int], _Worth],
    taken: list[int],
    generator: np.random.Generator,
) -> list[int]:
    """Pick `count` candidates not taken, uniformly among those worth much.

    Those worth little fill up what `_MOST_PASSED_OVER` of them leave to be filled; picks repeat
    only when there are too few of both.
    """
    picks: list[int] = []
    passed_over: list[int] = []
    if count == 0:
        return picks
    for position in _shuffled(len(candidates), generator):
        number = int(candidates[position])
        if number in taken:
            continue
        match worth(number):
            case _Worth.MUCH:
                picks.append(number)
            case _Worth.LITTLE:
                passed_over.append(number)
        if len(picks) == count:
            return picks
        if len(passed_over) == _MOST_PASSED_OVER * count:
            break
    picks += passed_over[: count - len(picks)]
    if len(picks) == count:
        return picks
    pool = picks + list(dict.fromkeys(taken))
    if pool:
        picks += [pool[i] for i in generator.integers(len(pool), size=count - len(picks))]
    return picks


def _shuffled(count: int, generator: np.random.Generator) -> Iterator[int]:
    """Yield 0 .. count - 1 in random order; each number costs O(1), so a few of many are cheap."""
    moved: dict[int, int] = {}  # a Fisher-Yates shuffle that writes down only what it has moved
    for i in range(count):
        j = int(generator.integers(i, count))
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)


def assemble(
    buffer: ReplayBuffer, numbers: Int64, slots: NDArray[Any], on_policy: NDArray[np.bool_]
) -> Batch:
    """Return the batch of given queries and samples; `slots` has shape [query, sample]."""
    drawn = (np.arange(len(slots))[:, None] << 32) | slots  # a row is a query and a slot
    unique, inverse = np.unique(drawn, return_inverse=True)
    row_slots = unique & 0xFFFF_FFFF
    return Batch(
        prompts=tuple(buffer.prompt(number) for number in numbers.tolist()),
        tokens=buffer.tokens("token", row_slots),
        log_mu=buffer.tokens("log_mu", row_slots),
        log_ref=buffer.tokens("log_ref", row_slots),
        reward=buffer.field("reward", row_slots),
        policy_version=buffer.field("policy_version", row_slots).astype(np.int64),
        reference_version=buffer.field("reference_version", row_slots).astype(np.int64),
        finished=buffer.field("finished", row_slots),
        slots=row_slots,
        query_of_row=unique >> 32,
        index=inverse.reshape(slots.shape),
        on_policy=on_policy,
        extras={name: buffer.tokens(name, row_slots) for name in buffer.extras},
    )
