r"""A language so small that every response can be written down: the tree of its prefixes.

Nodes are prefixes, numbered level by level: node n has the children words * n + 1 + a, one for
each word a. The last token, number `words`, ends the response. At `depth` tokens it is cut, without
an end. A response is numbered by the node where it stops, so a node is both the state in which the
next token is chosen and the response that ends there:

    states      nodes of fewer than `depth` tokens, where a policy has logits; the first nodes
    responses   all nodes; those of `depth` tokens are the cut ones

Every function is exact and works on many rows at once; a row has its own policy. Shapes are
[row, state, token] for tables of a policy and [row, response] for what a response has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of prefixes, and what can be enumerated on it."""

    words: int
    """Tokens that do not end a response; the end is one more, the last."""
    depth: int
    """Longest response, in tokens."""

    @property
    def states(self) -> int:
        """Number of prefixes after which a token is chosen."""
        return self._start(self.depth)

    @property
    def responses(self) -> int:
        """Number of responses, those that are cut included."""
        return self._start(self.depth + 1)

    def paths(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return state, token and mask of every step of every response; [response, token].

        Padding has state 0, token 0 and mask false.
        """
        states, tokens, masks = [], [], []
        for response in range(self.responses):
            path: list[tuple[int, int]] = []
            node = response
            while node > 0:
                parent, word = divmod(node - 1, self.words)
                path.insert(0, (parent, word))
                node = parent
            if response < self.states:
                path.append((response, self.words))
            pad = self.depth - len(path)
            masks.append([True] * len(path) + [False] * pad)
            states.append([state for state, _ in path] + [0] * pad)
            tokens.append([token for _, token in path] + [0] * pad)
        return torch.tensor(states), torch.tensor(tokens), torch.tensor(masks)

    def response_log_probs(self, log_probs: Tensor) -> Tensor:
        """Return log pi(y|x) of every response from a policy's table of log-probabilities."""
        reach = log_probs.new_zeros(log_probs.shape[0], 1)  # log-probability of each node
        found = []
        for level in range(self.depth):
            here = log_probs[:, self._start(level) : self._start(level + 1)]
            found.append(reach + here[..., self.words])
            reach = (reach.unsqueeze(-1) + here[..., : self.words]).flatten(1)
        return torch.cat([*found, reach], dim=1)

    def advantages(self, log_probs: Tensor, reward: Tensor) -> Tensor:
        """Return Q - V of every token under a policy: [row, state, token].

        Args:
            log_probs: The policy's table, [row, state, token].
            reward: Of every response, [row, response].
        """
        value = reward[:, self.states :]  # of the nodes of the level below, [row, node]
        levels: list[Tensor] = []
        for level in reversed(range(self.depth)):
            here = slice(self._start(level), self._start(level + 1))
            children = value.unflatten(1, (-1, self.words))
            quality = torch.cat([children, reward[:, here].unsqueeze(-1)], dim=-1)
            value = (log_probs[:, here].exp() * quality).sum(dim=-1)
            levels.insert(0, quality - value.unsqueeze(-1))
        return torch.cat(levels, dim=1)

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Return the responses that uniform numbers in [0, 1) choose: [row, sample].

        Args:
            logits: Of the policy that samples, [row, state, token].
            uniform: One number for each step, [row, sample, token].
        """
        node = torch.zeros_like(uniform[..., 0], dtype=torch.long)
        going = torch.ones_like(node, dtype=torch.bool)
        for step in range(self.depth):
            entries = at_states(logits, node)
            mass = (entries - entries.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
            number = uniform[..., step : step + 1] * mass[..., -1:]
            token = (mass[..., : self.words] <= number).sum(dim=-1)  # the end if above them all
            going &= token != self.words
            node = torch.where(going, node * self.words + 1 + token, node)
        return node

    def _start(self, level: int) -> int:
        """Return the first node of a level, which is the number of nodes above it."""
        return (self.words**level - 1) // (self.words - 1)


def log_probs_of(logits: Tensor) -> Tensor:
    """Return log-probabilities; with few tokens several times as fast as torch's log_softmax."""
    return logits - logits.logsumexp(dim=-1, keepdim=True)


def at_states(table: Tensor, state: Tensor) -> Tensor:
    """Return the entries of a table [row, state, token] at states [row, ...]: [row, ..., token]."""
    rows, states, tokens = table.shape
    first = torch.arange(rows).mul(states).view(-1, *[1] * (state.dim() - 1))
    # [row, state, token] -> [row * state, token]: a lookup by index has a cheap gradient
    flat = table.reshape(rows * states, tokens).index_select(0, (first + state).flatten())
    return flat.view(*state.shape, tokens)


def at_tokens(entries: Tensor, token: Tensor) -> Tensor:
    """Return the entries [row, ..., token] of the tokens that were taken: [row, ...]."""
    return entries.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def log_posterior(log_ref: Tensor, reward: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log pi* [row, response] and log Z [row]: equation (2) of `docs/algorithm.md`.

    Args:
        log_ref: log ref(y|x) of every response, [row, response].
        reward: Of every response, [row, response].
        beta: Strength of the KL term.
    """
    unnormalised = log_ref + reward / beta
    log_z = unnormalised.logsumexp(dim=1)
    return unnormalised - log_z.unsqueeze(1), log_z
