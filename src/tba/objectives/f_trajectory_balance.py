r"""f-trajectory balance: another function of the residual than its square.

    loss = beta mean_ij phi(delta_ij),
    delta_ij = sg[log Z^(x_i)] + log pi(y_ij|x_i) - log ref(y_ij|x_i) - r_ij / beta
    log Z^(x_i) = mean_j [ log ref(y_ij|x_i) - log pi(y_ij|x_i) + r_ij / beta ]

    huber   phi(x) = x^2 / 2 where |x| <= c, else c (|x| - c / 2)
    linex   phi(x) = c^2 (exp(x / c) - x / c - 1)

Source: "f-Trajectory Balance: A Loss Family for Tuning GFlowNets, Generative Models, and LLMs with
Off- and On-Policy Data" (Fawkes and Hartford, 2605.15417). c is `scale`, in nats. Each phi is x^2 /
2 near 0, so that the loss is then that of `trajectory_balance`, and so it is for large c.

phi says how an error weighs. Huber's gradient is -mean(clamp(A, +-beta c) grad log pi): advantages
are clipped. LINEX weighs exponentially the responses that are too probable (c > 0: mode-seeking) or
too improbable (c < 0: mode-covering). With samples of pi its gradient is, up to a factor, that of
an alpha-divergence, alpha = 1 + 1 / c: c = -1 is the forward KL, from the posterior to pi. It
overflows where delta / c reaches 88 in float32: take c of the size of the spread of r / beta.

log Z^ is detached, and unlike in the squared loss this matters: phi'(delta) does not sum to zero
over a query. delta still has mean zero there, so wherever phi' has the sign of its argument the
loss comes to rest at the posterior alone, whichever policy the samples come from.

How it differs from the paper: the factor beta (as in `trajectory_balance`), and the scale.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import log_ratio
from tba.objectives.squared import centred, squared_output


def huber(x: Float[Tensor, "..."], scale: float) -> Float[Tensor, "..."]:
    """Return x^2 / 2, continued linearly where |x| is above the scale."""
    inside = x.clamp(-scale, scale)
    return inside * (x - inside / 2)


def linex(x: Float[Tensor, "..."], scale: float) -> Float[Tensor, "..."]:
    """Return scale^2 (exp(u) - u - 1), u = x / scale: exponential on one side."""
    return scale**2 * (torch.expm1(x / scale) - x / scale)


PHI: Mapping[str, Callable[[Tensor, float], Tensor]] = {"huber": huber, "linex": linex}
"""The functions of the residual, by name; each is x^2 / 2 near 0."""


def f_tb(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    phi: Literal["huber", "linex"],
    scale: float,
) -> ObjectiveOutput:
    """Return beta times the mean of phi of the residual; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the KL term.
        phi: Function of the residual, by its name in `PHI`.
        scale: Residual at which phi leaves the square, in nats; negative mirrors LINEX.
    """
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    advantage = centred(reward) - beta * centred(kl)  # -beta times the residual
    loss = beta * PHI[phi](-advantage / beta, scale).mean()
    return squared_output(loss, advantage, reward, kl, log_z=reward / beta - kl)
