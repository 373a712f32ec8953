"""Scalars learned beside the policy: a value for each token, log Z for each query.

A head is a linear map of the policy's last hidden states that starts at zero, so it needs no random
numbers. Searchers see it only where they compute gradients (A3C). The value's gradient reaches the
policy's layers, as in PPO with a shared body; that of log Z does not: it is a property of the
query, not of the policy.
"""

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Heads(nn.Module):
    """The heads that an objective asks for by name: `value`, `log_z`; none is made unasked."""

    def __init__(self, width: int, names: Collection[str], device: torch.device) -> None:
        super().__init__()
        self._maps = nn.ModuleDict(
            {name: _zero(width, device) for name in ("value", "log_z") if name in names}
        )

    def value(self, states: Float[Tensor, "row token width"]) -> Float[Tensor, "row token"]:
        """Return the value before each token, from the states that predict the tokens."""
        return self._maps["value"](states.float()).squeeze(-1)

    def log_z(self, prompt_means: Float[Tensor, "query width"]) -> Float[Tensor, " query"]:
        """Return the learned scalar of each query, from the mean state over its prompt."""
        return self._maps["log_z"](prompt_means.detach().float()).squeeze(-1)


def _zero(width: int, device: torch.device) -> nn.Linear:
    head = nn.utils.skip_init(nn.Linear, width, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
