"""A language model small enough to enumerate, with its exact posterior.

The last token of the vocabulary ends a response. A response is cut at `max_tokens` without it, so
some leaves are finished and some are not. A policy is a table of logits, a row for each prefix that
can be continued; any distribution over the leaves is such a policy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from tba.objectives.base import ObjectiveOutput, declared


@dataclass(frozen=True)
class Tree:
    """All responses of a tiny vocabulary, as padded tensors."""

    vocabulary: int
    """Number of tokens, end token included."""
    tokens: Tensor
    """Tokens of each response, 0 at padding; [response, token]."""
    mask: Tensor
    """True at response tokens; [response, token]."""
    finished: Tensor
    """Whether the response ends with the end token; [response]."""
    state: Tensor
    """Row of the prefix before each token, 0 at padding; [response, token]. Finished responses come
    first, in the order of their prefixes: it is the number of the response ended there, too."""

    @property
    def states(self) -> int:
        """Number of prefixes that can be continued: the rows of a policy."""
        return int(self.state.max()) + 1

    def log_pi(self, logits: Tensor) -> Tensor:
        """Log-probability of each token, 0 at padding; [state, vocabulary] -> [response, token]."""
        log_p = logits.log_softmax(dim=-1)[self.state, self.tokens]
        return torch.where(self.mask, log_p, 0.0)

    def log_stop(self, logits: Tensor) -> Tensor:
        """Log-probability of the end token before each token, 0 at padding; [response, token]."""
        return torch.where(self.mask, logits.log_softmax(dim=-1)[self.state, -1], 0.0)

    def posterior(
        self, ref_logits: Tensor, reward: Tensor, beta: float, weight: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log pi* of each response and log Z, from equation (2), ref to the weight."""
        log_joint = weight * self.log_pi(ref_logits).sum(dim=-1) + reward / beta
        log_z = log_joint.logsumexp(dim=0)
        return log_joint - log_z, log_z

    def logits(self, log_p: Tensor) -> Tensor:
        """Return the policy with these log-probabilities of the responses."""
        table = log_p.new_full((self.states, self.vocabulary), float("-inf"))
        for response, position in self.mask.nonzero().tolist():
            at = int(self.state[response, position]), int(self.tokens[response, position])
            table[at] = torch.logaddexp(table[at], log_p[response])
        return table

    def inputs(
        self,
        logits: Tensor,
        ref_logits: Tensor,
        mu_logits: Tensor,
        reward: Tensor,
        samples: Tensor,
        **more: Tensor,
    ) -> dict[str, Tensor]:
        """Return the inputs of an objective for one query with these responses as its samples."""
        of_responses = {
            "log_pi": self.log_pi(logits),
            "log_stop": self.log_stop(logits),
            "log_ref": self.log_pi(ref_logits),
            "log_ref_stop": self.log_stop(ref_logits),
            "log_mu": self.log_pi(mu_logits),
            "mask": self.mask,
            "finished": self.finished,
            "reward": reward,
            "prefix_reward": reward[self.state],
        }
        return {name: value[samples].unsqueeze(0) for name, value in of_responses.items()} | more


def tree(vocabulary: int = 3, max_tokens: int = 3) -> Tree:
    """Enumerate the responses."""
    end = vocabulary - 1
    prefixes = [p for n in range(max_tokens) for p in product(range(end), repeat=n)]
    leaves = [(*p, end) for p in prefixes] + list(product(range(end), repeat=max_tokens))
    padded = [(*leaf, *[0] * (max_tokens - len(leaf))) for leaf in leaves]
    mask = torch.tensor([[t < len(leaf) for t in range(max_tokens)] for leaf in leaves])

    state = [
        [prefixes.index(leaf[:t]) if t < len(leaf) else 0 for t in range(max_tokens)]
        for leaf in leaves
    ]
    return Tree(
        vocabulary=vocabulary,
        tokens=torch.tensor(padded),
        mask=mask,
        finished=torch.tensor([leaf[-1] == end for leaf in leaves]),
        state=torch.tensor(state),
    )


def call(
    objective: Callable[..., ObjectiveOutput], inputs: dict[str, Tensor], **settings: object
) -> ObjectiveOutput:
    """Call an objective with those of the inputs that it names."""
    return objective(*(inputs[name] for name in declared(objective)[0]), **settings)


def total_variation(log_p: Tensor, log_q: Tensor) -> float:
    """Return half the summed difference of two distributions over the responses."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum().item()
