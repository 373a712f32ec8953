"""Samples of a buffer by staleness, and what one batch of a bin says about its distance.

Staleness is the policy's version less the sample's. A bin gives one batch, as a trainer would draw
it uniformly: some queries, K samples of that bin for each.

    log_prob_mismatch        |log pi - log mu|, mean over the tokens of a query
    kl_k1, kl_k3             sum_t (log mu - log pi) and sum_t (rho_t - 1 - log rho_t): estimates of
                             KL(mu || pi) of a response; the second is never negative
    effective_sample_share   (sum w)^2 / (K sum w^2), w = pi(y) / mu(y), over the K samples
    clipped_share            tokens where PPO's surrogate is constant, rho_t having gone as far as
                             the sign of r - mean r wants
    outside_share            tokens whose ratio is outside 1 +- CLIP_RANGE, whatever the sign
    log_z                    mean_j [alpha log ref - log pi + r / beta], equation (4) with the
                             exponent alpha of the reference in the posterior

with rho_t = pi(y_t) / mu(y_t), mu the policy that sampled. Each is a number a query, so that
micro-batches of whole queries are exact.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from tba.buffer import ReplayBuffer
from tba.errors import ConfigError
from tba.inputs import Inputs, StepFacts
from tba.objectives.masked import log_ratio
from tba.objectives.metrics import distance_to_sampling
from tba.objectives.ratio import group_advantage, is_clipped, k3
from tba.records import Batch, Int64, Outcome
from tba.run.metrics import staleness_histogram
from tba.run.rollouts import is_given
from tba.sampling import assemble
from tba.update import micro_batches

CLIP_RANGE = 0.2
"""What PPO and GRPO clip at by default."""
_BIN = re.compile(r"(\d+)(?:-(\d+)|(\+))?")
_FACTS = StepFacts(mean_reward=0.0, mean_tokens=1.0, progress=0.0, prepared={})
"""Nothing here asks for them."""


@dataclass(frozen=True, slots=True)
class Bin:
    """A range of staleness, in versions."""

    name: str
    """`2`, `2-3` or `2+`."""
    low: int
    """Least."""
    high: int | None
    """Greatest; none: without end."""


@dataclass(frozen=True, slots=True)
class BinSamples:
    """The samples of a buffer that fall into a bin."""

    bin: Bin
    """Which one."""
    slots: Mapping[int, NDArray[np.int32]]
    """By query number: its slots of this bin, newest last; queries with at least one."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        return sum(map(len, self.slots.values()))

    def drawable(self) -> list[int]:
        """Return the queries with two samples or more: one alone has nothing to compare with."""
        return [number for number, slots in self.slots.items() if len(slots) >= 2]


def parse_bins(text: str) -> list[Bin]:
    """Read bins such as `0,1,2-3,4+`.

    Raises:
        ConfigError: They are something else, or not in ascending order.
    """
    bins = []
    for word in text.split(","):
        match = _BIN.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"--bins is {text}, but {word!r} is no range: write numbers and ranges such as "
                "0,1,2-3,4+"
            )
        low, high, is_open = match.groups()
        bins.append(Bin(word, int(low), None if is_open else int(high or low)))
    bounds = [(b.low, np.inf if b.high is None else b.high) for b in bins]
    flat = [bound for pair in bounds for bound in pair]
    if flat != sorted(flat) or any(a[1] == b[0] for a, b in pairwise(bounds)):
        raise ConfigError(
            f"--bins is {text}, but bins must ascend and not overlap: write for example 0,1,2-3,4+"
        )
    return bins


def samples_by_bin(
    buffer: ReplayBuffer, version: int, bins: Sequence[Bin] | None
) -> list[BinSamples]:
    """Sort a buffer's samples into the bins, or into those of `metrics.jsonl` up to the largest."""
    per_query = [buffer.samples(number) for number in range(len(buffer.queries_seen))]
    stale = [version - buffer.field("policy_version", slots) for slots in per_query]
    if bins is None:
        counts = staleness_histogram(np.concatenate([np.empty(0, np.int64), *stale]))
        bins = parse_bins(",".join(counts)) if counts else []
    return [
        BinSamples(
            bin_,
            {
                number: slots[fits]
                for number, (slots, age) in enumerate(zip(per_query, stale, strict=True))
                if (fits := _fits(bin_, age)).any()
            },
        )
        for bin_ in bins
    ]


def draw_bin(
    buffer: ReplayBuffer,
    samples: BinSamples,
    *,
    queries: int,
    samples_per_query: int,
    generator: np.random.Generator,
) -> Batch:
    """Draw up to `queries` drawable queries of a bin and K of its samples for each, uniformly.

    Where there are fewer than K, each is taken, and again as often as it was found.
    """
    drawable = np.array(samples.drawable())
    numbers = generator.choice(drawable, min(queries, len(drawable)), replace=False)
    draws = []
    for number in numbers.tolist():
        slots = samples.slots[number]
        if len(slots) >= samples_per_query:
            draws.append(generator.choice(slots, samples_per_query, replace=False))
            continue
        found = buffer.field("found", slots)
        again = generator.choice(slots, samples_per_query - len(slots), p=found / found.sum())
        draws.append(np.concatenate([slots, again]))
    return assemble(buffer, numbers, np.stack(draws), np.zeros(len(numbers), dtype=np.bool_))


@torch.no_grad()
def measure(
    inputs: Inputs,
    batch: Batch,
    *,
    beta: float,
    reference_weight: float,
    micro_batch_tokens: int,
) -> dict[str, NDArray[np.float64]]:
    """Return what `sample_measures` says of each query of a batch, each of shape [query]."""
    micros = list(micro_batches(batch, micro_batch_tokens))
    parts = []
    for queries in micros:
        given = inputs.of_loss(batch.select(queries), _FACTS)
        names = ("log_pi", "log_mu", "log_ref", "mask", "reward")
        tensors = (torch.as_tensor(given[name]) for name in names)
        parts.append(sample_measures(*tensors, beta=beta, reference_weight=reference_weight))
    order = np.argsort(np.concatenate([np.asarray(queries) for queries in micros]))
    return {
        name: torch.cat([part[name] for part in parts]).double().cpu().numpy()[order]
        for name in parts[0]
    }


def sample_measures(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    reference_weight: float = 1.0,
) -> dict[str, Float[Tensor, " query"]]:
    """Return the figures of each query that the module's head lists, by name."""
    log_rho = log_ratio(log_pi, log_mu, mask)  # [query, sample, token]
    rho = log_rho.exp()
    tokens = mask.sum(dim=(1, 2))  # [query]
    clipped = is_clipped(rho, group_advantage(reward).unsqueeze(-1), CLIP_RANGE, CLIP_RANGE)
    outside = (rho - 1).abs() > CLIP_RANGE
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    more_ref = (reference_weight - 1) * log_ref.masked_fill(~mask, 0).sum(dim=-1)
    return {
        **distance_to_sampling(log_pi, log_mu, mask),
        "kl_k1": -log_rho.sum(dim=-1).mean(dim=-1),
        "kl_k3": k3(log_mu, log_pi, mask).sum(dim=-1).mean(dim=-1),
        "clipped_share": (clipped & mask).sum(dim=(1, 2)) / tokens,
        "outside_share": (outside & mask).sum(dim=(1, 2)) / tokens,
        "log_z": (reward / beta - kl + more_ref).mean(dim=-1),
    }


def reference_log_z(
    logged: Iterable[pa.RecordBatch], beta: float, reference_weight: float = 1.0
) -> dict[int, float]:
    """Return log Z from the logged responses of version 0, by query id.

    It is log mean exp(r / beta) for a posterior that holds the reference itself; for one that holds
    its power alpha, log mean exp(r / beta + (alpha - 1) log ref). Version 0 is the reference; given
    answers are not its responses. Every response counts, since a mean over those that the buffer
    keeps would leave out the ones found again later.
    """
    scaled: dict[int, list[float]] = {}
    for query_id, reward, log_ref in _of_the_reference(logged):
        exponent = reward / beta + (reference_weight - 1) * log_ref
        scaled.setdefault(query_id, []).append(exponent)
    return {query_id: _log_mean_exp(np.array(own)) for query_id, own in scaled.items()}


def _log_mean_exp(values: NDArray[np.float64]) -> float:
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).mean()))


def _of_the_reference(
    logged: Iterable[pa.RecordBatch],
) -> Iterator[tuple[int, float, float]]:
    """Yield query id, reward and log-probability of each scored response of the reference."""
    for logged_batch in logged:
        batch = logged_batch.filter(pc.invert(is_given(logged_batch)))
        names = ("policy_version", "outcome", "query_id", "reward", "log_ref")
        for version, outcome, query_id, reward, log_ref in zip(
            *(batch[name].to_pylist() for name in names), strict=True
        ):
            if version == 0 and outcome == Outcome.OK:
                yield query_id, reward, sum(log_ref)


def _fits(bin_: Bin, age: Int64) -> NDArray[np.bool_]:
    return (age >= bin_.low) & (age <= (np.inf if bin_.high is None else bin_.high))
