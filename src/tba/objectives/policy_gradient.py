r"""Policy gradients on whole responses: REINFORCE, leave-one-out, and two asymmetric forms.

    R_j = r_j - beta sum_t (log mu - log ref)      KL of the policy that sampled, inside the reward
    rho_j = pi(y_j) / mu(y_j)                      ratio of a whole response

    REINFORCE       -(R_j - b) log pi(y_j),  b = mean reward of the whole batch      Williams, 1992
    RLOO            -(R_j - mean_{i != j} R_i) log pi(y_j)                         arXiv 2402.14740
    proximal RLOO   -min(rho_j A_j, clip(rho_j, 1 +- eps) A_j), A_j as in RLOO     arXiv 2410.18252
    TOPR            -R_j log pi(y_j) if R_j >= 0, else -sg[min(rho_j, 1)] R_j log pi(y_j),
                    R_j = r_j - baseline                                           arXiv 2503.14286
    AsymRE          -(r_j - V) log pi(y_j),  V = mean_i r_i - delta                arXiv 2506.20520

Each loss is the mean over responses, then queries; log pi(y|x) is the sum over response tokens.
The anchor of the ratios is `log_mu`, the policy that sampled; REINFORCE, RLOO and AsymRE have no
ratio. Detached: everything but `log_pi`, the KL in the reward included, which is that of the stored
log-probabilities and so does not see the policy being trained.

How they differ from the papers: with one sample a query RLOO has no baseline, and no gradient here.
TOPR's rewards are +1 and -1 in the paper; `baseline` 1/2 makes 0/1 rewards +-1/2, half of the
paper's loss. A baseline that is a constant keeps the paper's point that a query answered only right
(or only wrong) still teaches, which a mean over the query's samples would lose.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio
from tba.objectives.metrics import reward_metrics
from tba.objectives.ratio import (
    bounded_exp,
    clipped_surrogate,
    group_advantage,
    is_clipped,
    kl_metric,
    sequence_ratio_metrics,
    taper,
    weighted_surrogate,
)


def penalised_reward(
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    beta: float,
) -> Float[Tensor, "query sample"]:
    """Return R = r - beta sum_t (log mu - log ref), detached."""
    kl = log_ratio(log_mu.detach(), log_ref, mask).sum(dim=-1)
    return reward.detach().to(kl.dtype) - beta * kl


def leave_one_out(reward: Float[Tensor, "query sample"]) -> Float[Tensor, "query sample"]:
    """Return each reward less the mean of the query's others, K / (K - 1) times A; 0 at K = 1."""
    samples = reward.shape[1]
    return group_advantage(reward) * (samples / max(samples - 1, 1))


def reinforce(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    mean_reward: Float[Tensor, ""],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return the REINFORCE loss, without a ratio; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled, for the KL in the reward.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        mean_reward: Mean raw reward of the whole batch: the baseline.
        beta: Strength of the KL term.
    """
    baseline = mean_reward.detach()
    advantage = penalised_reward(log_mu, log_ref, mask, reward, beta) - baseline
    loss = -(advantage * at_responses(log_pi, mask).sum(dim=-1)).mean()
    return ObjectiveOutput(loss, reward_metrics(reward) | kl_metric(log_pi, log_ref, mask))


def rloo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return the RLOO loss, without a ratio; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled, for the KL in the reward.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the KL term.
    """
    advantage = leave_one_out(penalised_reward(log_mu, log_ref, mask, reward, beta))
    loss = -(advantage * at_responses(log_pi, mask).sum(dim=-1)).mean()
    return ObjectiveOutput(loss, reward_metrics(reward) | kl_metric(log_pi, log_ref, mask))


def rloo_proximal(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    clip_range: float,
) -> ObjectiveOutput:
    """Return the RLOO loss with PPO's clip on the sequence ratio, anchored at `log_mu`.

    Args:
        log_pi: Log-probabilities under the policy being trained; the only input with gradient.
        log_mu: The same under the policy that sampled: the anchor of the ratio, and the KL.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the KL term.
        clip_range: The ratio of a response counts up to 1 +- this.
    """
    advantage = leave_one_out(penalised_reward(log_mu, log_ref, mask, reward, beta))
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask).sum(dim=-1))
    loss = -clipped_surrogate(ratio, advantage, clip_range, clip_range).mean()
    clipped = is_clipped(ratio, advantage, clip_range, clip_range)
    metrics = (
        reward_metrics(reward)
        | kl_metric(log_pi, log_ref, mask)
        | sequence_ratio_metrics(ratio, clipped)
    )
    return ObjectiveOutput(loss=loss, metrics=metrics)


def topr(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    baseline: float,
) -> ObjectiveOutput:
    """Return the TOPR loss, its ratio anchored at `log_mu`; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        baseline: Responses with a smaller reward are made less probable, the others more.
    """
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask).sum(dim=-1))
    advantage = reward.detach().to(ratio.dtype) - baseline
    log_pi_sum = at_responses(log_pi, mask).sum(dim=-1)
    loss = -weighted_surrogate(taper(ratio, advantage), advantage, log_pi_sum).mean()
    truncated = (advantage < 0) & (ratio > 1)
    metrics = reward_metrics(reward) | sequence_ratio_metrics(ratio, truncated)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def asymre(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    delta: float,
) -> ObjectiveOutput:
    """Return the AsymRE loss, without a ratio; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        delta: How far the baseline lies under the mean reward of the query's samples.
    """
    advantage = group_advantage(reward) + delta
    loss = -(advantage * at_responses(log_pi, mask).sum(dim=-1)).mean()
    return ObjectiveOutput(loss=loss, metrics=reward_metrics(reward))
