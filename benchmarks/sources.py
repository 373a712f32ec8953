"""The worlds of the benchmark, and the sources of its samples; `posterior.py` says what they are.

Rows are seeds, sources and queries, in this order, flattened: [seed, source, query] -> [row].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.tree import Tree, at_states, at_tokens, log_posterior, log_probs_of

TREE = Tree(words=4, depth=5)
QUERIES = 8
SAMPLES = 16
BETA = 1.0
STALENESS = {"stale 4": 4, "stale 16": 16, "stale 64": 64}  # in steps
SOURCES = ("on-policy", *STALENESS, "buffer", "uniform")
ON_POLICY_PROB = 0.5


@dataclass(frozen=True, slots=True)
class World:
    """What is given: of each row, with what can be computed from it; rows as in `SOURCES`."""

    log_ref: Tensor
    """Logits and log-probabilities of the reference; [row, state, token]."""
    reward: Tensor
    """Of every response; [row, response]."""
    log_posterior: Tensor
    """log pi* of every response; [row, response]."""
    log_z: Tensor
    """[row]."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Responses of one step, and what is known of the policy that sampled them."""

    response: Tensor
    """[row, sample]."""
    log_mu: Tensor
    """Log-probabilities under the policy that sampled; [row, sample, token]."""
    step_advantage: Tensor
    """Advantages under it, zeros where no objective asks; [row, sample, token]."""


class Paths:
    """The steps of responses: looks up what happens along them."""

    def __init__(self) -> None:
        self._state, self._token, self._mask = TREE.paths()

    def of(self, response: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return state, token and mask of responses [row, sample]: [row, sample, token]."""
        return self._state[response], self._token[response], self._mask[response]


def make_world(seeds: int) -> World:
    """Return the rows of all seeds; the sources of a seed share its queries."""
    refs, rewards = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        shape = (QUERIES, TREE.states, TREE.words + 1)
        refs.append(torch.randn(shape, generator=generator).log_softmax(dim=-1))
        rewards.append(torch.randn(QUERIES, TREE.responses, generator=generator))

    def rows(parts: list[Tensor]) -> Tensor:
        # [seed, query, ...] -> [seed, source, query, ...] -> [row, ...]
        stacked = torch.stack(parts).unsqueeze(1)
        return stacked.expand(-1, len(SOURCES), *stacked.shape[2:]).flatten(0, 2).contiguous()

    log_ref, reward = rows(refs), rows(rewards)
    log_star, log_z = log_posterior(
        TREE.response_log_probs(log_ref.double()), reward.double(), BETA
    )
    return World(log_ref, reward, log_star, log_z)


def by_source(rows: Tensor, seeds: int) -> Tensor:
    """Return a view [row, ...] -> [seed, source, query, ...]."""
    return rows.view(seeds, len(SOURCES), QUERIES, *rows.shape[1:])


class Sampler:
    """Draws the responses of a step from the sources, and remembers what they need."""

    def __init__(
        self, world: World, paths: Paths, seeds: int, steps: int, *, advantages: bool
    ) -> None:
        self._reward, self._paths, self._seeds = world.reward, paths, seeds
        self._advantages = advantages
        self._generators = [torch.Generator().manual_seed(1000 + seed) for seed in range(seeds)]
        start = by_source(world.log_ref, seeds)
        self._past = {
            name: start[:, SOURCES.index(name)].expand(lag, *[-1] * 4).clone()
            for name, lag in STALENESS.items()
        }  # by step modulo lag; [lag, seed, query, state, token]
        shape = (seeds, QUERIES, steps * SAMPLES)
        self._found = Draws(
            torch.zeros(shape, dtype=torch.long),
            torch.zeros(*shape, TREE.depth),
            torch.zeros(*shape, TREE.depth) if advantages else torch.zeros(*shape, 1),
        )

    def draw(self, step: int, logits: Tensor) -> Draws:
        """Return the draws of one step, `logits` being the policy's at this step."""
        logits = self._sampling_policies(step, logits)
        response = TREE.draw(logits, self._uniform(TREE.depth).flatten(0, 2))
        state, token, _ = self._paths.of(response)
        log_mu = at_tokens(log_probs_of(at_states(logits, state)), token)
        advantage = torch.zeros(*response.shape, 1)
        if self._advantages:
            table = TREE.advantages(log_probs_of(logits), self._reward)
            advantage = at_tokens(at_states(table, state), token)
        draws = Draws(response, log_mu, advantage)
        self._replay(step, draws)
        return draws

    def _uniform(self, last: int) -> Tensor:
        """Return uniform numbers [seed, source, query, sample, last], a stream for each seed."""
        shape = (len(SOURCES), QUERIES, SAMPLES, last)
        return torch.stack([torch.rand(shape, generator=g) for g in self._generators])

    def _sampling_policies(self, step: int, logits: Tensor) -> Tensor:
        """Return the logits that sample in each row, and remember those of this step."""
        mixed = by_source(logits.clone(), self._seeds)
        for name, lag in STALENESS.items():
            rows = mixed[:, SOURCES.index(name)]
            now = rows.clone()
            rows.copy_(self._past[name][step % lag])  # of step - lag, or the reference
            self._past[name][step % lag].copy_(now)
        mixed[:, SOURCES.index("uniform")] = 0.0
        return mixed.flatten(0, 2)

    def _replay(self, step: int, draws: Draws) -> None:
        """Add the buffer's rows, and replace those of about half the queries by what was found."""
        filled = (step + 1) * SAMPLES
        chance = self._uniform(2)[:, SOURCES.index("buffer")]  # [seed, query, sample, 2]
        replayed = chance[..., :1, 0] >= ON_POLICY_PROB  # one number a query: [seed, query, 1]
        index = (chance[..., 1].double() * filled).long()
        for name in Draws.__slots__:
            rows = by_source(getattr(draws, name), self._seeds)[:, SOURCES.index("buffer")]
            found = getattr(self._found, name)
            found[:, :, filled - SAMPLES : filled] = rows
            wide = (...,) + (None,) * (rows.dim() - 3)
            old = found.gather(2, index[wide].expand_as(rows))
            rows.copy_(torch.where(replayed[wide], old, rows))
