r"""PPO and VinePPO: the clipped surrogate with an advantage for every token.

    S(rho, A) = min(rho A, clip(rho, 1 +- eps) A),   rho_t = pi(y_t) / mu(y_t)

    PPO       mean_t [ -S(rho_t, A_t) + c_v / 2 max( (V_t - G_t)^2, (V_t^clip - G_t)^2 ) ]
              A_t whitened, G_t = A_t + V_t^old before whitening; from `ppo_targets`
              V_t^clip = V_t within V_t^old +- eps_v
    VinePPO   mean_t [ -S(rho_t, A_t) + c_k k3_t ]
              A_t = r_i + V(s_{i+1}) - V(s_i) of the step i of token t

Sources: "Proximal Policy Optimization Algorithms", arXiv 1707.06347; "High-Dimensional Continuous
Control Using Generalized Advantage Estimation", arXiv 1506.02438; "VinePPO", arXiv 2410.01679;
section 5 of `docs/algorithm.md`. Means are over all response tokens of a query, then over queries.

The anchor is `log_mu`, the policy that sampled. Detached: all but `log_pi` and `value`. PPO's
targets are computed once a step on the whole batch (`ppo_targets`), since whitening needs its mean
and standard deviation; token rewards are -beta (log mu - log ref), plus the reward at the last
response token. VinePPO's step advantages are given: the searcher estimates V(s) by the mean reward
of fresh rollouts from the prefix.

How they differ from the papers: there the anchor is the policy at the start of the step, which with
fresh samples is the one that sampled. Whitening and value clipping follow TRL's PPO. VinePPO's
advantages are not whitened. The mean over tokens is a query's, not the batch's.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio, mean_over_query_tokens
from tba.objectives.metrics import reward_metrics
from tba.objectives.ratio import (
    bounded_exp,
    clipped_surrogate,
    is_clipped,
    k3,
    kl_metric,
    token_ratio_metrics,
)
from tba.objectives.returns import generalised_advantage, token_rewards, whitened


def ppo_targets(
    value: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
    discount: float,
    gae_lambda: float,
) -> Mapping[str, Tensor]:
    """Return advantages whitened over the whole batch, targets of the values, and the values.

    Args:
        value: Values of the state before each token, before this step.
        log_mu: Log-probabilities of the response tokens under the policy that sampled.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        beta: Strength of the KL term in the token rewards.
        discount: Factor of a reward one token later.
        gae_lambda: 0 trusts the values, 1 the rewards.
    """
    value = at_responses(value.detach(), mask)
    token_reward = token_rewards(log_ratio(log_mu.detach(), log_ref, mask), mask, reward, beta)
    advantage = generalised_advantage(
        token_reward, value, mask, discount=discount, gae_lambda=gae_lambda
    )
    return {
        "advantage": whitened(advantage, mask),
        "value_target": advantage + value,
        "value_old": value,
    }


def clipped_value_loss(
    value: Float[Tensor, "query sample token"],
    value_target: Float[Tensor, "query sample token"],
    value_old: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    value_clip_range: float,
) -> Float[Tensor, "query sample token"]:
    """Return half the larger squared error of the value and of the value near its old one."""
    value = at_responses(value, mask)
    target, old = at_responses(value_target.detach(), mask), at_responses(value_old.detach(), mask)
    near = old + (value - old).clamp(-value_clip_range, value_clip_range)
    return 0.5 * torch.maximum((value - target).square(), (near - target).square())


def ppo(  # noqa: PLR0913 (inputs are declared by name)
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    value: Float[Tensor, "query sample token"],
    advantage: Float[Tensor, "query sample token"],
    value_target: Float[Tensor, "query sample token"],
    value_old: Float[Tensor, "query sample token"],
    *,
    clip_range: float,
    value_clip_range: float,
    value_coefficient: float,
) -> ObjectiveOutput:
    """Return the PPO loss, anchored at `log_mu`; gradient flows through `log_pi` and `value`.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards, for the metrics alone: the advantages hold them.
        value: Values of the state before each token.
        advantage: Whitened advantages of `ppo_targets`.
        value_target: What the values should be, of `ppo_targets`.
        value_old: The values before this step, of `ppo_targets`.
        clip_range: The ratio counts up to 1 +- this.
        value_clip_range: A value gains nothing by moving further than this from `value_old`.
        value_coefficient: Weight of the value loss.
    """
    advantage = at_responses(advantage.detach(), mask)
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    policy_loss = -clipped_surrogate(ratio, advantage, clip_range, clip_range)
    value_loss = clipped_value_loss(value, value_target, value_old, mask, value_clip_range)
    loss = mean_over_query_tokens(policy_loss + value_coefficient * value_loss, mask)
    clipped = is_clipped(ratio, advantage, clip_range, clip_range)
    metrics = reward_metrics(reward) | token_ratio_metrics(ratio, clipped, mask)
    metrics["value_loss"] = mean_over_query_tokens(value_loss.detach(), mask)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def vineppo(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    step_advantage: Float[Tensor, "query sample token"],
    *,
    clip_range: float,
    kl_coefficient: float,
) -> ObjectiveOutput:
    """Return the VinePPO loss, anchored at `log_mu`; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards, for the metrics alone: the step advantages hold them.
        step_advantage: Monte-Carlo advantage of each token's step.
        clip_range: The ratio counts up to 1 +- this.
        kl_coefficient: Weight of the k3 loss.
    """
    advantage = at_responses(step_advantage.detach(), mask)
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask))
    surrogate = clipped_surrogate(ratio, advantage, clip_range, clip_range)
    loss = mean_over_query_tokens(kl_coefficient * k3(log_pi, log_ref, mask) - surrogate, mask)
    clipped = is_clipped(ratio, advantage, clip_range, clip_range)
    metrics = (
        reward_metrics(reward)
        | kl_metric(log_pi, log_ref, mask)
        | token_ratio_metrics(ratio, clipped, mask)
    )
    return ObjectiveOutput(loss=loss, metrics=metrics)
