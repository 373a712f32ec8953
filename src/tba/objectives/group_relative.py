r"""Group-relative objectives: the advantage of a response is taken among the query's own samples.

    A_j = r_j - mean_i r_i;   rho_t = pi(y_t) / mu(y_t);   S(rho, A) = min(rho A, clip(rho) A)

    GRPO       mean_j mean_t [ -S(rho_t, A_j / (std + eps)) + beta k3_t ]          arXiv 2402.03300
    Dr. GRPO   mean_j sum_t  [ -S(rho_t, A_j) ] / (longest allowed completion)     arXiv 2503.20783
    GSPO       mean_j        [ -S(s_j, A_j / (std + eps)) ]                        arXiv 2507.18071
               s_j = (pi(y_j) / mu(y_j))^(1/|y_j|), clipped to [1 - low, 1 + high]

The anchor of every ratio is `log_mu`, the policy that sampled. Detached: anchor, reference and
advantages. std is over the query's samples and divides by K - 1, as in TRL (`torch.std`).

How they differ from the papers: there the anchor is the policy at the start of the step, which with
fresh samples is the one that sampled; with stale samples it is not, and recomputing it would make
the ratio 1. GSPO's paper has no eps.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import log_ratio, mean_over_sequences, sum_over_tokens
from tba.objectives.metrics import reward_metrics
from tba.objectives.ratio import (
    bounded_exp,
    clipped_surrogate,
    group_advantage,
    is_clipped,
    k3,
    kl_metric,
    scaled_group_advantage,
    sequence_ratio_metrics,
    token_ratio_metrics,
)


def grpo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    clip_range: float,
    std_epsilon: float,
) -> ObjectiveOutput:
    """Return the GRPO loss, anchored at `log_mu`; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        beta: Strength of the k3 term.
        clip_range: The ratio counts up to 1 +- this.
        std_epsilon: Added to the standard deviation of a query's rewards.
    """
    advantage = scaled_group_advantage(reward, std_epsilon).unsqueeze(-1)
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    surrogate = clipped_surrogate(ratio, advantage, clip_range, clip_range)
    loss = mean_over_sequences(beta * k3(log_pi, log_ref, mask) - surrogate, mask)
    clipped = is_clipped(ratio, advantage, clip_range, clip_range)
    metrics = (
        reward_metrics(reward)
        | kl_metric(log_pi, log_ref, mask)
        | token_ratio_metrics(ratio, clipped, mask)
    )
    return ObjectiveOutput(loss=loss, metrics=metrics)


def dr_grpo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    max_tokens: int,
    *,
    clip_range: float,
) -> ObjectiveOutput:
    """Return the Dr. GRPO loss, anchored at `log_mu`; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        max_tokens: Longest allowed completion, the constant that divides sums over tokens.
        clip_range: The ratio counts up to 1 +- this.
    """
    advantage = group_advantage(reward).unsqueeze(-1)
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    surrogate = clipped_surrogate(ratio, advantage, clip_range, clip_range)
    loss = sum_over_tokens(-surrogate, mask) / max_tokens
    clipped = is_clipped(ratio, advantage, clip_range, clip_range)
    metrics = reward_metrics(reward) | token_ratio_metrics(ratio, clipped, mask)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def gspo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    clip_low: float,
    clip_high: float,
    std_epsilon: float,
) -> ObjectiveOutput:
    """Return the GSPO loss, anchored at `log_mu`; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; a constant added to all rewards of a query changes nothing.
        clip_low: The sequence ratio counts down to 1 - this.
        clip_high: The sequence ratio counts up to 1 + this.
        std_epsilon: Added to the standard deviation of a query's rewards.
    """
    advantage = scaled_group_advantage(reward, std_epsilon)
    tokens = mask.sum(dim=-1).clamp(min=1)  # |y|, [query, sample]
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask).sum(dim=-1) / tokens)
    loss = -clipped_surrogate(ratio, advantage, clip_low, clip_high).mean()
    clipped = is_clipped(ratio, advantage, clip_low, clip_high)
    metrics = reward_metrics(reward) | sequence_ratio_metrics(ratio, clipped)
    return ObjectiveOutput(loss=loss, metrics=metrics)
