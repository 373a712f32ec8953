r"""Trajectory balance with the VarGrad estimate of log Z: the TBA loss.

    L = mean_ij ( sg[log Z^(x_i)] + log pi(y_ij|x_i) - log ref(y_ij|x_i) - r_ij / beta )^2     (5)
    log Z^(x_i) = mean_j [ log ref(y_ij|x_i) - log pi(y_ij|x_i) + r_ij / beta ]                (4)

Source: "Trajectory Balance with Asynchrony", arXiv 2503.18929; equations (4) and (5) of
`docs/algorithm.md`. log pi(y|x) is the sum over response tokens, end-of-sequence included.

log Z^ is detached. With all K samples in the estimate this changes nothing, because the residuals
of a query sum to zero; it keeps log Z^ a constant of the loss, as in the paper.

How it differs from the paper: the loss is (beta / 2) L. Its gradient is -mean(A grad log pi) with
the advantage A_ij = (r_ij - mean_j r_ij) - beta (k_ij - mean_j k_ij), k = log pi - log ref, so
learning rate and gradient clipping keep their meaning while beta moves. The residual of (5) is
-A / beta, so the loss is computed as mean(A^2) / (2 beta), in which nothing of the size of
1 / beta^2 occurs.

With a weight w of the reference, log ref is w log ref throughout, and the posterior is
ref(y|x)^w exp(r / beta) / Z: the tempered prior of red-teaming (`docs/redteam.md`).
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import log_ratio
from tba.objectives.squared import centred, squared_loss, squared_output, weighted_log_ratio


def trajectory_balance(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    reference_weight: float = 1.0,
) -> ObjectiveOutput:
    """Return (beta / 2) times the TBA loss (5); gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the KL term.
        reference_weight: w, the exponent of the reference in the posterior.
    """
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # k_ij, [query, sample]
    reward = reward.detach().to(kl.dtype)
    k_w = weighted_log_ratio(kl, log_ref, mask, reference_weight)
    advantage = centred(reward) - beta * centred(k_w)  # -beta times the residual of (5)
    loss = squared_loss(advantage, beta=beta)
    return squared_output(loss, advantage, reward, kl, log_z=reward / beta - k_w)
