r"""Trajectory balance whose log Z is learned: TB with a Z head, DRO, FlowRL.

    tb_learned_z   (beta / 2) mean_ij ( log Z_i + k_ij - r_ij / beta )^2
    dro            mean_ij ( r_ij - V_i - beta k_ij )^2 / 2
    flowrl         (beta / 2) mean_ij ( log Z_i + k_ij / |y_ij| - rhat_ij / beta )^2

k = log pi(y|x) - log ref(y|x), summed over the response tokens; rhat is the reward less its mean
over the samples of the query, divided by their standard deviation. Gradient flows through `log_pi`
and through the learned scalar `log_z`; reference and rewards are detached. None has an importance
ratio, and the first two are zero at the posterior alone, whichever policy the samples come from.

Sources: trajectory balance, equation (3) of `docs/algorithm.md` ("Trajectory Balance with
Asynchrony", arXiv 2503.18929), as in GFlowNet red-teaming (Lee et al., 2405.18540); "Offline
Regularised Reinforcement Learning for Large Language Models Alignment" (DRO, 2405.19107); "FlowRL:
Matching Reward Distributions for LLM Reasoning" (2509.15207).

How they differ from the papers:

1. `tb_learned_z` has the factor beta / 2, so its gradient is -mean(A grad log pi) as that of
   `trajectory_balance`, to which it is equal where log Z is the VarGrad estimate.
2. FlowRL writes the residual with beta rhat, beta 15: our beta is the reciprocal. It multiplies
   the squared residual with the detached clipped ratio of policy and sampling policy; here there
   is no ratio. Standard deviations are those of the population, so one sample gives rhat = 0.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import log_ratio
from tba.objectives.squared import centred, squared_loss, squared_output, weighted_log_ratio


def tb_learned_z(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    log_z: Float[Tensor, "query"],
    *,
    beta: float,
    reference_weight: float = 1.0,
) -> ObjectiveOutput:
    """Return trajectory balance (3) with a learned log Z, times beta / 2.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant c added to them moves the best log Z by c / beta.
        log_z: Learned log Z of each query, in nats; its gradient is -mean_j A_ij / queries.
        beta: Strength of the KL term.
        reference_weight: Exponent of the reference in the posterior, as in `trajectory_balance`.
    """
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    k_w = weighted_log_ratio(kl, log_ref, mask, reference_weight)
    advantage = (reward - beta * log_z.to(kl.dtype).unsqueeze(1)) - beta * k_w
    return squared_output(squared_loss(advantage, beta=beta), advantage, reward, kl, log_z)


def dro(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    log_z: Float[Tensor, "query"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return direct reward optimisation: the residual in reward units, squared and halved.

    With V = beta log Z it is beta times `tb_learned_z`: the same residual and the same optimum. The
    two differ as updates: here the gradient of the policy shrinks with beta (times beta), which the
    learning rate must make good, and the learned scalar is of the size of the rewards and gets the
    gradient of plain regression on them, where log Z is of the size of rewards / beta.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to them moves the best V by as much.
        log_z: Learned value V of each query, in units of the reward: V = beta log Z.
        beta: Strength of the KL term.
    """
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    advantage = (reward - log_z.to(kl.dtype).unsqueeze(1)) - beta * kl
    loss = advantage.square().mean() / 2
    return squared_output(loss, advantage, reward, kl, log_z / beta)


def flowrl(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    log_z: Float[Tensor, "query"],
    *,
    beta: float,
    std_epsilon: float,
) -> ObjectiveOutput:
    """Return length-normalised trajectory balance with a learned log Z, times beta / 2.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added within a query changes nothing, nor does a factor.
        log_z: Learned log Z of each query, in nats a token.
        beta: Strength of the KL term: one standard deviation of the reward is worth 1 / beta nats a
            token.
        std_epsilon: Added to the standard deviation of the rewards of a query.
    """
    kl = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    surplus = centred(reward - reward[:, :1])  # exactly zero where all rewards are equal
    standard = surplus / (surplus.std(dim=1, correction=0, keepdim=True) + std_epsilon)
    per_token = kl / mask.sum(dim=-1).clamp(min=1)
    advantage = (standard - beta * log_z.to(kl.dtype).unsqueeze(1)) - beta * per_token
    return squared_output(squared_loss(advantage, beta=beta), advantage, reward, kl, log_z)
