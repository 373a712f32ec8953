r"""Modified sub-trajectory balance: every prefix of a response could have been the response.

State s_t is the response before token t; log R(s_t) = log ref(y_<t) + log ref(stop|s_t) + r_t /
beta, with r_t the reward of the response ended there, and p_T(s) = pi(stop|s):

    delta_t = log R(s_t) + log pi(y_t|s_t) + log p_T(s_{t+1}) - log R(s_{t+1}) - log p_T(s_t)
    loss = (beta / 2) mean_ij [ sum_{a<b} lambda^(b-a-1) (sum_{t=a}^{b-1} delta_t)^2
                                / sum_{a<b} lambda^(b-a-1) ]

Source: "Amortizing intractable inference in large language models" (Hu et al., 2310.04363). The
sums telescope. With A_t = r_t - beta [ log pi(y_<t, stop) - log ref(y_<t, stop) ], the advantage of
trajectory balance for the response stopped at s_t, up to its baseline,

    sum_{t=a}^{b-1} delta_t = (A_a - A_b) / beta,

so the loss is a weighted variance of A over the prefixes of a response, as VarGrad is the variance
over the responses of a query. (At lambda 1 it is twice the unbiased variance, times 1 / (2 beta).)
It is zero at the posterior alone, because all responses share s_0, and one response per query is
enough.

Ends. The last state of a finished response is the one before its end token, whose stop it is: there
A is that of the whole response. A response cut at the maximum length has one state more, in which
it stops with probability 1: there too A is that of the whole response. So the last state always
takes `reward` and the sum over all tokens, and `log_stop` is read before it only.

The reference, prefix rewards and rewards are detached. How it differs from the paper: beta / 2,
beta in place of a likelihood's temperature, weights normalised within a response (there: within the
batch) so that a loss is a mean over queries, and a response of one state, which has no pair, counts
as zero. Pairs are summed as the quadratic form of a graph Laplacian, so memory grows with the
length and not with its square, but for one matrix of weights.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses, log_ratio
from tba.objectives.metrics import reward_metrics


def subtb(  # noqa: PLR0913 - the method needs these inputs
    log_pi: Float[Tensor, "query sample token"],
    log_stop: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    log_ref_stop: Float[Tensor, "query sample token"],
    prefix_reward: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    finished: Bool[Tensor, "query sample"],
    *,
    beta: float,
    subtb_lambda: float = 1.0,
) -> ObjectiveOutput:
    """Return (beta / 2) times modified SubTB; gradient flows through `log_pi` and `log_stop`.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_stop: Log-probability of the end token before each token, under the same.
        log_ref: Log-probabilities of the response tokens under the reference.
        log_ref_stop: Log-probability of the end token before each token, under the reference.
        prefix_reward: Raw reward of the response ended before each token.
        mask: True at response tokens, which come first; the values at padding are ignored.
        reward: Raw rewards; a constant added to them and to the prefix rewards changes nothing.
        finished: Whether the last token is the end token; false where the response was cut.
        beta: Strength of the KL term.
        subtb_lambda: Weight of a pair of states for each step of its distance.
    """
    token_kl = log_ratio(log_pi, log_ref, mask)
    kl = token_kl.sum(dim=-1)  # [query, sample]
    reward = reward.detach().to(kl.dtype)
    # Log-ratio of the response ended before each token: the tokens before it, and the stop.
    ended = token_kl.cumsum(dim=-1) - token_kl + log_ratio(log_stop, log_ref_stop, mask)
    stopped = at_responses(prefix_reward.detach(), mask) - beta * ended
    state = torch.arange(mask.shape[-1] + 1, device=mask.device)  # s_0 .. s_T
    last = (mask.sum(dim=-1) - finished.long()).unsqueeze(-1)  # [query, sample, 1]
    # [query, sample, state]; the last state takes the whole response
    advantage = torch.where(state == last, (reward - beta * kl).unsqueeze(-1), pad(stopped, (0, 1)))
    loss = _pair_mean(advantage, state <= last, subtb_lambda).mean() / (2 * beta)
    metrics = {**reward_metrics(reward, kl), "log_z": advantage[..., 0].detach().mean() / beta}
    return ObjectiveOutput(loss=loss, metrics=metrics)


def _pair_mean(
    values: Float[Tensor, "query sample state"],
    visited: Bool[Tensor, "query sample state"],
    subtb_lambda: float,
) -> Float[Tensor, "query sample"]:
    """Return the mean of (x_a - x_b)^2 over pairs a < b of visited states, by lambda^(b-a-1)."""
    state = torch.arange(values.shape[-1], device=values.device, dtype=values.dtype)
    distance = (state.unsqueeze(0) - state.unsqueeze(1)).abs()
    weights = torch.where(distance > 0, subtb_lambda ** (distance - 1), 0.0)  # [state, state]
    count = visited.to(values.dtype)
    total = torch.where(visited, values, 0.0).detach().sum(dim=-1, keepdim=True)
    mean = total / count.sum(dim=-1, keepdim=True).clamp(min=1)
    x = torch.where(visited, values - mean, 0.0)  # centred, for accuracy: differences stay
    degree = count * (count @ weights)
    squares = (degree * x.square()).sum(dim=-1) - (x * (x @ weights)).sum(dim=-1)
    pairs = degree.sum(dim=-1) / 2  # 0 without a pair, else at least 1
    return squares / pairs.clamp(min=1.0)
