r"""Tapered trajectory balance: the TBA update for stale samples at high rates.

    A_ij = (r_ij - mean_j r_ij) - beta (k_ij - mean_j k_ij),   k_ij = log pi(y_ij) - log ref(y_ij)
    w_ij = 1 where A_ij >= 0, else min(rho_ij, 1),             rho_ij = pi(y_ij) / mu(y_ij)
    loss = -mean_ij( sg[w_ij A_ij] log pi(y_ij|x_i) )

mu is the policy that sampled. A is -beta times the residual of trajectory balance, as in
`trajectory_balance`, whose gradient this is where every w is 1. The weight is the taper of TOPR,
"Tapered Off-Policy REINFORCE", arXiv 2503.14286: what is to become more probable is learned from at
full weight, however old; what is to become less probable counts only as much as the policy would
still say it. Without it a sample goes on being pushed down long after the policy has ceased to find
it, which is what makes plain trajectory balance fall at rates that fresh samples bear
(docs/log.md).

A and w are detached: the loss is a surrogate whose value means nothing, `tb_loss` is that of
`trajectory_balance` on the same batch.

How it differs from both papers: TOPR's advantage is the reward less a constant. The posterior
ref(y|x) exp(r / beta) / Z(x) stays a fixed point, since there every A is zero, whichever policy
sampled and whatever the weights are. Gradient descent on a language small enough to enumerate
reaches it (tests/objectives/test_posterior.py), more slowly than that of `trajectory_balance`.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio
from tba.objectives.ratio import (
    bounded_exp,
    sequence_ratio_metrics,
    taper,
    weighted_surrogate,
)
from tba.objectives.squared import centred, squared_loss, squared_output


def tb_tapered(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return the tapered surrogate; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the KL term.
    """
    kl = log_ratio(log_pi.detach(), log_ref, mask).sum(dim=-1)  # k_ij, [query, sample]
    reward = reward.detach().to(kl.dtype)
    advantage = centred(reward) - beta * centred(kl)
    ratio = bounded_exp(log_ratio(log_pi.detach(), log_mu, mask).sum(dim=-1))
    log_pi_sum = at_responses(log_pi, mask).sum(dim=-1)
    loss = -weighted_surrogate(taper(ratio, advantage), advantage, log_pi_sum).mean()
    output = squared_output(loss, advantage, reward, kl)
    metrics = {
        **output.metrics,
        **sequence_ratio_metrics(ratio, (advantage < 0) & (ratio > 1)),
        "tb_loss": squared_loss(advantage, beta=beta),
    }
    return ObjectiveOutput(loss=output.loss, metrics=metrics)
