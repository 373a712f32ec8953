r"""The kernel of the squared family: one residual, squared.

    A_ij = (r_ij - V_i) - beta k_ij,     k_ij = sum_t [ log pi(y_t) - log anchor(y_t) ]
    loss = mean_ij A_ij^2 / (2 beta),    gradient = -mean_ij( A_ij grad log pi(y_ij|x_i) )

A is minus beta times the residual of trajectory balance, with V = beta log Z. A member of the
family chooses the anchor (the reference, or the policy that sampled) and V (the mean over the
samples of a query, a learned scalar, an estimate made beforehand). The division by 2 beta gives the
gradient the size of a policy gradient with advantage A, whatever beta is.

There is no importance ratio. If V may be beta log Z(x), the loss is zero at the posterior
anchor(y|x) exp(r / beta) / Z(x), and there alone, whichever policy the samples come from.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses
from tba.objectives.metrics import reward_metrics


def centred(values: Float[Tensor, "query sample"]) -> Float[Tensor, "query sample"]:
    """Return the values less the detached mean over the samples of their query."""
    return values - values.detach().mean(dim=1, keepdim=True)


def squared_loss(advantage: Float[Tensor, "query sample"], *, beta: float) -> Float[Tensor, ""]:
    """Return mean(A^2) / (2 beta), in which nothing of the size of 1 / beta^2 occurs."""
    return advantage.square().mean() / (2 * beta)


def weighted_log_ratio(
    kl: Float[Tensor, "query sample"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    weight: float,
) -> Float[Tensor, "query sample"]:
    """Return log pi - weight log ref of each response, from kl = log pi - log ref."""
    if weight == 1:
        return kl
    return kl + (1 - weight) * at_responses(log_ref.detach(), mask).sum(dim=-1)


def squared_output(
    loss: Float[Tensor, ""],
    advantage: Float[Tensor, "query sample"],
    reward: Float[Tensor, "query sample"],
    kl: Float[Tensor, "query sample"] | None = None,
    log_z: Float[Tensor, "query ..."] | None = None,
) -> ObjectiveOutput:
    """Return the loss with the metrics of the family.

    Args:
        loss: The loss, with gradient.
        advantage: A, whose mean size is reported.
        reward: Raw rewards.
        kl: log pi - log ref of each response, where the method has a reference.
        log_z: The log Z in use, where the method has one.
    """
    metrics = reward_metrics(reward, kl)
    metrics["advantage_abs_mean"] = advantage.detach().abs().mean()
    if log_z is not None:
        metrics["log_z"] = log_z.detach().mean()
    return ObjectiveOutput(loss=loss, metrics=metrics)
