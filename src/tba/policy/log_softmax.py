"""log softmax at chosen tokens, in float32, without a float32 matrix of [state, vocabulary].

    log p(token) = logit / T - log sum exp(logits / T)
    its gradient with respect to the logits: (one-hot - p) / T

The logits stay in the precision in which the head made them. They are read in strips of a few
states, small enough that all that is computed on a strip happens in a CPU's cache. The gradient
overwrites the logits, strip by strip, so the backward pass needs no memory of their size and can
be taken once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba.policy.forward import to_device
from tba.records import Int64


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which logits are asked for."""

    state: Int[Tensor, " prediction"]
    """Not decreasing."""
    token: Int[Tensor, " prediction"]
    """What is predicted."""
    stops: Int[Tensor, " stop"]
    """Tokens that end a response, perhaps none."""
    strip: int
    """States in a strip."""
    bounds: Sequence[int]
    """First prediction of each strip, and behind the last one the number of all."""


def choose(state: Int64, token: Int64, stops: Int[Tensor, " stop"], strip: int) -> Chosen:
    """Return the choice of tokens [prediction] at states [prediction]."""
    cuts = np.arange(0, int(state[-1]) + 1, strip)  # the last state has a prediction
    bounds = [*np.searchsorted(state, cuts).tolist(), len(state)]
    device = stops.device
    return Chosen(to_device(state, device), to_device(token, device), stops, strip, bounds)


def log_softmax_at(
    logits: Float[Tensor, "state vocabulary"], chosen: Chosen, temperature: float
) -> tuple[Float[Tensor, " prediction"], Float[Tensor, " prediction"]]:
    """Return log softmax(logits / temperature) at the tokens, and summed over the stop tokens.

    Where there are no stop tokens, the second is zero.
    """
    of_token, of_stop = _LogSoftmaxAt.apply(logits, chosen, temperature)  # type: ignore[no-untyped-call]
    return of_token, of_stop


class _LogSoftmaxAt(torch.autograd.Function):
    """Forward and backward pass, strip by strip."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, chosen: Chosen, temperature: float
    ) -> tuple[Tensor, Tensor]:
        strips = logits.split(chosen.strip)
        total = torch.cat([(strip.float() / temperature).logsumexp(-1) for strip in strips])
        at_tokens = logits[chosen.state, chosen.token].float() / temperature
        of_token = at_tokens - total[chosen.state]
        of_stop = torch.zeros_like(of_token)
        if len(chosen.stops):
            stops = (logits[:, chosen.stops].float() / temperature).logsumexp(-1)
            of_stop = (stops - total)[chosen.state]
        ctx.save_for_backward(logits, total)
        ctx.chosen, ctx.temperature = chosen, temperature
        return of_token, of_stop

    @staticmethod
    def backward(ctx: Any, of_token: Tensor, of_stop: Tensor) -> tuple[Tensor, None, None]:
        logits, total = ctx.saved_tensors
        chosen, temperature = ctx.chosen, ctx.temperature
        of_state = torch.zeros_like(total).index_add_(0, chosen.state, of_token)
        of_stops = None
        if len(chosen.stops):  # of the stop tokens' logits, besides what all logits get
            among = (logits[:, chosen.stops].float() / temperature).softmax(-1)
            weight = torch.zeros_like(total).index_add_(0, chosen.state, of_stop)
            of_stops = among * weight[:, None]
            of_state += weight
        for start, (first, last) in zip(
            range(0, len(logits), chosen.strip), pairwise(chosen.bounds), strict=True
        ):
            strip = slice(start, start + chosen.strip)
            probability = (logits[strip].float() / temperature).sub_(total[strip, None]).exp_()
            gradient = probability.mul_(-of_state[strip, None])
            place = (chosen.state[first:last] - start, chosen.token[first:last])
            gradient.index_put_(place, of_token[first:last], accumulate=True)
            if of_stops is not None:
                gradient[:, chosen.stops] += of_stops[strip]
            logits[strip] = gradient.div_(temperature)
        return logits, None, None
