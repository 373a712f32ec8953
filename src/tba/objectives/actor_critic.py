r"""Actor-critic on trajectories: IMPALA's V-trace, and A3C's advantage.

    r_t = -beta k_t, plus the reward at the last response token;   gamma = discount

    V-trace   rho_t = pi(y_t) / mu(y_t),  c_t = min(c_bar, rho_t)
              delta_t = min(rho_bar, rho_t) (r_t + gamma V_{t+1} - V_t)
              v_t - V_t = delta_t + gamma c_t (v_{t+1} - V_{t+1})
              loss_t = -sg[min(rho_bar, rho_t) (r_t + gamma v_{t+1} - V_t)] log pi(y_t)
                       + c_v / 2 (sg[v_t] - V_t)^2
    A3C       R_t = r_t + gamma R_{t+1}
              loss_t = -sg[R_t - V_t] log pi(y_t) + c_v / 2 (R_t - V_t)^2

Sources: "IMPALA", arXiv 1802.01561; "Asynchronous Methods for Deep Reinforcement Learning", arXiv
1602.01783; section 5 of `docs/algorithm.md`. Losses are summed over the tokens of a response, as
the policy gradient is, then averaged over responses and queries. V_t is the value of the state
before token t; the state after the last token is worth 0.

V-trace's anchor is `log_mu`, the policy that sampled, whose KL its rewards pay: k = log mu - log
ref. A3C has no ratio, since its searchers differentiate with the weights that sampled: k = log pi -
log ref. Detached: all but `log_pi` in log pi(y_t) and `value` in V_t of the value loss.

With this KL, R_t - V_t is zero for every response at the posterior ref exp(R / beta) / Z with V_t =
beta log Z of the prefix (discount 1): A3C's loss is a path consistency, whose fixed point does not
depend on who sampled. That of V-trace does, through the KL of the sampler and the caps.

How they differ from the papers: no entropy bonus, which log-probabilities of the sampled tokens
alone do not give; the KL term stands in its place. A3C's return runs to the end of the response
(n unbounded). That searchers compute A3C's gradient and send it is `tba.actor_learner`'s part.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio, mean_over_query_tokens, sum_over_tokens
from tba.objectives.metrics import reward_metrics
from tba.objectives.ratio import bounded_exp, kl_metric, token_ratio_metrics
from tba.objectives.returns import next_value, reverse_scan, token_rewards


def vtrace_targets(
    ratio: Float[Tensor, "query sample token"],
    token_reward: Float[Tensor, "query sample token"],
    value: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    *,
    discount: float | Float[Tensor, "query sample token"],
    rho_bar: float,
    c_bar: float,
) -> tuple[Float[Tensor, "query sample token"], Float[Tensor, "query sample token"]]:
    """Return V-trace's values v_t and policy advantages, both detached and 0 at padding.

    Args:
        ratio: pi(y_t) / mu(y_t).
        token_reward: Reward of each token.
        value: Values of the state before each token.
        mask: True at response tokens.
        discount: Factor of what comes one token later.
        rho_bar: Cap of the ratio in errors and advantages: decides which policy is evaluated.
        c_bar: Cap of the ratio that passes errors back: decides how fast.
    """
    ratio, token_reward, value = (
        at_responses(given.detach(), mask) for given in (ratio, token_reward, value)
    )
    rho = ratio.clamp(max=rho_bar)
    delta = rho * (token_reward + discount * next_value(value, mask) - value)
    correction = reverse_scan(delta, discount * ratio.clamp(max=c_bar), mask)  # v - V
    target = torch.where(mask, value + correction, 0.0)
    advantage = rho * (token_reward + discount * next_value(target, mask) - value)
    return target, torch.where(mask, advantage, 0.0)


def vtrace(  # noqa: PLR0913 (inputs are declared by name)
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    value: Float[Tensor, "query sample token"],
    *,
    beta: float,
    discount: float,
    rho_bar: float,
    c_bar: float,
    value_coefficient: float,
) -> ObjectiveOutput:
    """Return IMPALA's loss, anchored at `log_mu`; gradient flows through `log_pi` and `value`.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_mu: The same under the policy that sampled: the anchor of the ratio.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        value: Values of the state before each token.
        beta: Strength of the KL term in the token rewards.
        discount: Factor of a reward one token later.
        rho_bar: Cap of the ratio in errors and advantages.
        c_bar: Cap of the ratio that passes errors back.
        value_coefficient: Weight of the value loss.
    """
    ratio = bounded_exp(log_ratio(log_pi, log_mu, mask)).detach()
    token_reward = token_rewards(log_ratio(log_mu.detach(), log_ref, mask), mask, reward, beta)
    target, advantage = vtrace_targets(
        ratio, token_reward, value, mask, discount=discount, rho_bar=rho_bar, c_bar=c_bar
    )
    value_loss = 0.5 * (target - at_responses(value, mask)).square()
    policy_loss = -advantage * at_responses(log_pi, mask)
    loss = sum_over_tokens(policy_loss + value_coefficient * value_loss, mask)
    metrics = _critic_metrics(log_pi, log_ref, mask, reward, value_loss)
    metrics |= token_ratio_metrics(ratio, ratio > rho_bar, mask)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def a3c(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    value: Float[Tensor, "query sample token"],
    *,
    beta: float,
    discount: float,
    value_coefficient: float,
) -> ObjectiveOutput:
    """Return A3C's loss, without a ratio; gradient flows through `log_pi` and `value`.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        value: Values of the state before each token.
        beta: Strength of the KL term in the token rewards.
        discount: Factor of a reward one token later.
        value_coefficient: Weight of the value loss.
    """
    token_reward = token_rewards(log_ratio(log_pi.detach(), log_ref, mask), mask, reward, beta)
    error = reverse_scan(token_reward, discount, mask) - at_responses(value, mask)  # R - V
    policy_loss = -error.detach() * at_responses(log_pi, mask)
    value_loss = 0.5 * error.square()
    loss = sum_over_tokens(policy_loss + value_coefficient * value_loss, mask)
    metrics = _critic_metrics(log_pi, log_ref, mask, reward, value_loss)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def _critic_metrics(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    value_loss: Float[Tensor, "query sample token"],
) -> dict[str, Tensor]:
    """Return the metrics of a policy with a critic."""
    return (
        reward_metrics(reward)
        | kl_metric(log_pi, log_ref, mask)
        | {"value_loss": mean_over_query_tokens(value_loss.detach(), mask)}
    )
