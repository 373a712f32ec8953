r"""Squared residuals against the policy that sampled, and what is left of them without an anchor.

With k = log pi(y|x) - log mu(y|x) against mu, the policy that sampled, rbar and kbar the means over
the samples of the query, and V* = beta log Z* an estimate made beforehand with samples of the
reference:

    kimi        mean_ij ( r_ij - rbar_i - tau k_ij )^2 / (2 tau)                       2501.12599
    gvpo        mean_ij ( r_ij - rbar_i - beta (k_ij - kbar_i) )^2 / (2 beta)          2504.19599
    opmd        -mean_ij ( r_ij - rbar_i ) log pi(y_ij|x_i) / (1 + tau)                2505.17826
    a_star_po   mean_ij ( r_ij - V*_ij - beta k_ij )^2 / (2 beta), k to the reference 2505.20686

Gradient flows through `log_pi` alone. The anchor is the policy that sampled each response, so these
are rounds of mirror descent whose anchor moves along. Anchor, estimate and rewards are detached.

Where they come to rest:

1. `gvpo` with mu fixed: mu(y|x) exp(r / beta) / Z. As mu follows pi, round upon round multiplies by
   exp(r / beta), towards the best reward: there is no KL to a reference. With mu = ref it is
   `trajectory_balance` and rests at the posterior.
2. `kimi` takes rbar for tau log Z, which leaves out tau kbar. With samples of a fixed mu it rests
   where w = pi / mu solves tau log w + c w = r - rbar, c = tau KL(mu || pi): flatter than gvpo's,
   and the same to first order in the spread of r / tau.
3. `opmd` has no anchor: samples of pi give the policy gradient, which rests at the best rewards;
   samples of a fixed mu push without end towards the response of largest mu(y|x) (r - rbar).
4. `a_star_po` rests at the posterior of the reference, if V* is exact and was made with this beta.

How they differ from the papers: Kimi's, GVPO's and A*-PO's losses are divided so that the gradient
is -mean(A grad log pi). A*-PO estimates V* with one beta and fits with a smaller one, which has no
posterior as its optimum; here they are one.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio
from tba.objectives.squared import centred, squared_loss, squared_output


def kimi(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    tau: float,
) -> ObjectiveOutput:
    """Return Kimi's mirror descent; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        tau: Strength of the pull to the policy that sampled.
    """
    k = log_ratio(log_pi, log_mu, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(k.dtype)
    advantage = centred(reward) - tau * k
    return squared_output(squared_loss(advantage, beta=tau), advantage, reward)


def gvpo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return group variance policy optimisation: VarGrad with the sampling policy as reference.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the pull to the policy that sampled.
    """
    k = log_ratio(log_pi, log_mu, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(k.dtype)
    advantage = centred(reward) - beta * centred(k)
    return squared_output(squared_loss(advantage, beta=beta), advantage, reward)


def opmd(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    tau: float,
) -> ObjectiveOutput:
    """Return the surrogate of OPMD, whose gradient is its update and whose value means nothing.

    It is the first step of `kimi` from pi = mu, divided by 1 + tau.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        tau: Damping: the update is divided by 1 + tau.
    """
    log_p = at_responses(log_pi, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(log_p.dtype)
    advantage = centred(reward)
    return squared_output(-(advantage * log_p).mean() / (1 + tau), advantage, reward)


def a_star_po(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    log_z_star: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return A*-PO: trajectory balance with a log Z estimated beforehand; one sample is enough.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards, on the scale that the estimate was made with.
        log_z_star: log mean exp(r / beta) over samples of the reference, stored with each sample.
        beta: Strength of the KL term, the same as in the estimate.
    """
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    log_z_star = log_z_star.detach().to(kl.dtype)
    advantage = (reward - beta * log_z_star) - beta * kl
    return squared_output(squared_loss(advantage, beta=beta), advantage, reward, kl, log_z_star)
