"""Sampling by inverting the cumulative distribution, in two levels.

Summing up a whole vocabulary token by token is slow. So the probabilities are summed in blocks; the
uniform number first finds its block among the blocks' sums, and then its token within the block.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 256
"""Tokens in a block."""
_CHUNK_ON_CPU = 2**19
"""Scores that are worked on at a time on a CPU: few enough to stay in its cache."""


def pick(
    scores: Float[Tensor, "group vocabulary"],
    uniform: Float[Tensor, "group sample"],
    temperature: float,
    top_p: float = 1.0,
) -> tuple[Int[Tensor, "group sample"], Float[Tensor, "group sample"]]:
    """Return tokens and their float32 log-probabilities; at temperature 0 the most likely ones.

    Below 1, `top_p` leaves the fewest tokens that have this share of the probability together, and
    the log-probabilities are those of what is left.
    """
    size = len(scores)
    if scores.device.type == "cpu":
        size = max(1, _CHUNK_ON_CPU // scores.shape[1])
    chunks = zip(scores.split(size), uniform.split(size), strict=True)
    tokens, log_probs = zip(
        *(
            _pick_chunk(part.to(torch.float32, copy=True), numbers, temperature, top_p)
            for part, numbers in chunks
        ),
        strict=True,
    )
    return torch.cat(tokens), torch.cat(log_probs)


def _pick_chunk(
    scores: Float[Tensor, "group vocabulary"],
    uniform: Float[Tensor, "group sample"],
    temperature: float,
    top_p: float,
) -> tuple[Int[Tensor, "group sample"], Float[Tensor, "group sample"]]:
    """Pick in a chunk of float32 scores, which are overwritten."""
    if temperature == 0:
        token = scores.argmax(dim=-1, keepdim=True)
        log_prob = scores.gather(1, token) - scores.logsumexp(dim=-1, keepdim=True)
        return token.expand(uniform.shape), log_prob.expand(uniform.shape)
    if temperature != 1:
        scores.div_(temperature)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    if top_p < 1:
        weights = weights.masked_fill(_outside(weights, top_p), 0.0)
    token, total = _invert(weights, uniform)
    return token, (weights.gather(1, token) / total).log()


def _outside(
    weights: Float[Tensor, "group vocabulary"], top_p: float
) -> Bool[Tensor, "group vocabulary"]:
    """Say which tokens are not needed for a share of the sum, the likeliest being taken first."""
    ordered, token = weights.sort(dim=-1, descending=True)
    sums = ordered.cumsum(dim=-1)
    outside = sums - ordered >= top_p * sums[:, -1:]
    outside[:, 0] = False
    return torch.zeros_like(outside).scatter_(1, token, outside)


def _invert(
    weights: Float[Tensor, "group vocabulary"], uniform: Float[Tensor, "group sample"]
) -> tuple[Int[Tensor, "group sample"], Float[Tensor, "group 1"]]:
    """Return the first token whose share of the sum exceeds the uniform number, and the sum."""
    groups, vocabulary = weights.shape
    if vocabulary <= _BLOCK:
        sums = weights.cumsum(dim=-1)
        return _first_above(sums, uniform * sums[:, -1:]), sums[:, -1:]
    if missing := -vocabulary % _BLOCK:
        weights = pad(weights, (0, missing))
    blocks = weights.unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1).cumsum(dim=-1)  # [group, block]
    sought = uniform * sums[:, -1:]
    block = _first_above(sums, sought)
    rest = sought - pad(sums, (1, 0)).gather(1, block)
    of_group = torch.arange(groups, device=weights.device)[:, None]
    within = blocks[of_group, block].cumsum(dim=-1)  # [group, sample, token of the block]
    token = _first_above(within, rest.unsqueeze(-1)).squeeze(-1)
    token = (block * _BLOCK + token).clamp(max=vocabulary - 1)  # beyond only for NaN
    return token, sums[:, -1:]


def _first_above(
    sums: Float[Tensor, "*group entry"], sought: Float[Tensor, "*group sample"]
) -> Int[Tensor, "*group sample"]:
    """Return the first entry above a number; never one that adds nothing to the sums.

    Rounding may bring the number up to the last sum: it is held just below.
    """
    below = torch.nextafter(sums[..., -1:], torch.zeros_like(sums[..., -1:]))
    found = torch.searchsorted(sums, torch.minimum(sought, below), right=True)
    return found.clamp(max=sums.shape[-1] - 1)  # a diverged policy's NaN is found nowhere
