r"""TBA': the TBA update as a policy gradient, with a capped token ratio.

    A_ij = (r_ij - mean_j r_ij) - beta (k_ij - mean_j k_ij)
    k_ij = sum_t clamp( log pi(y_t) - log ref(y_t), +-kl_clamp )
    loss = -mean_ij( A_ij sum_t sg[min(rho_t, ratio_cap)] log pi(y_t) ),  rho_t = pi(y_t) / mu(y_t)

mu is the policy that sampled. Source: "Trajectory Balance with Asynchrony", arXiv 2503.18929, the
variant TBA' of its section on MATH, and its public code (bbartoldson/tba-prime), which has the
ratio and the clamp.

A and the weights are detached: the loss is a surrogate whose gradient is the update and whose value
means nothing. `tb_loss` is the loss of `trajectory_balance` on the same batch, to watch instead.
Without cap (weight 1) and clamp its gradient is that of `trajectory_balance`.

How it differs from the public code: no length normalisation, and the reset of the reference every
few steps is the trainer's matter. With a ratio the fixed point is no longer the posterior for every
sampling policy: the cap makes it depend on mu.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio, mean_over_query_tokens
from tba.objectives.ratio import bounded_exp
from tba.objectives.squared import centred, squared_loss, squared_output


def tb_prime(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    ratio_cap: float | None,
    kl_clamp: float | None,
) -> ObjectiveOutput:
    """Return the surrogate of TBA'; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the KL term.
        ratio_cap: Largest weight of a token; None gives every token weight 1.
        kl_clamp: Largest |log pi - log ref| of a token in the advantage, in nats; None: no limit.
    """
    token_kl = log_ratio(log_pi.detach(), log_ref, mask)
    kl = token_kl.sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    limited = token_kl if kl_clamp is None else token_kl.clamp(-kl_clamp, kl_clamp)
    advantage = centred(reward) - beta * centred(limited.sum(dim=-1))
    ratio = bounded_exp(log_ratio(log_pi.detach(), log_mu, mask))  # rho, 1 at padding
    cap = float("inf") if ratio_cap is None else ratio_cap
    weight = torch.ones_like(ratio) if ratio_cap is None else ratio.clamp(max=cap)
    surrogate = (weight * at_responses(log_pi, mask)).sum(dim=-1)  # [query, sample]
    output = squared_output(-(advantage * surrogate).mean(), advantage, reward, kl)
    metrics = {
        **output.metrics,
        "tb_loss": squared_loss(centred(reward) - beta * centred(kl), beta=beta),
        "ratio_mean": mean_over_query_tokens(ratio, mask),
        "clipped_share": mean_over_query_tokens((ratio > cap).to(ratio.dtype), mask),
    }
    return ObjectiveOutput(loss=output.loss, metrics=metrics)
