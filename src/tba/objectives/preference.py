r"""Preferences between samples of a query: online DPO, DPO and IPO.

    k_j = sum_t [ log pi(y_jt) - log ref(y_jt) ]        h = k_better - k_worse

    online DPO   -log sigmoid(beta h), better and worse: the best and the worst of the K samples
    DPO          -log sigmoid(beta h)                   mean over all pairs with r_i > r_j
    IPO          (h - 1 / (2 beta))^2                   mean over all pairs with r_i > r_j

Sources: DPO is "Direct Preference Optimization", arXiv 2305.18290, equation (7). IPO is "A General
Theoretical Paradigm to Understand Learning from Human Preferences", arXiv 2310.12036, equation
(17), whose tau is our beta. Online DPO with the best and the worst of K is the baseline of
"Trajectory Balance with Asynchrony", arXiv 2503.18929; section 5 of `docs/algorithm.md`.

Rewards only order the samples: their size, and any increasing function of them, changes nothing.
The reference and the rewards are detached: they are given. There is no ratio to the policy that
sampled, so the data may come from any policy.

How it differs from the papers: preferences come from the rewards of a query's samples, and a query
may have many pairs. With `buffer.given = "pairs"` and K = 2 its samples are the two answers that a
row gives (`tba.given`), and DPO and IPO are the papers'. A query is one term of the mean whether it
has pairs or not, so that micro-batches of whole queries are exact: with equal rewards it
contributes zero loss and gradient. IPO sums log-probabilities over tokens, as the paper writes; its
authors' runs, and TRL, divide each sum by its length.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import log_ratio
from tba.objectives.metrics import reward_metrics
from tba.records import Float32, Int64


def online_dpo(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return the DPO loss of the best against the worst sample of each query.

    Gradient flows through `log_pi` alone, and there through two samples a query, so the trainer
    gives it no others (`best_and_worst`). The first of equal samples is taken.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards, which choose the two samples.
        beta: Strength of the KL term.
    """
    k = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    best, worst = (
        k.gather(1, chosen(reward, dim=1, keepdim=True)).squeeze(1)
        for chosen in (torch.argmax, torch.argmin)
    )
    margin = best - worst  # h, [query]
    unequal = (reward != reward[:, :1]).any(dim=1)
    loss = torch.where(unequal, -logsigmoid(beta * margin), 0.0).mean()
    accuracy = (unequal & (margin > 0)).to(k.dtype).mean()
    metrics = reward_metrics(reward, k) | {"pair_accuracy": accuracy}
    return ObjectiveOutput(loss=loss, metrics=metrics)


def best_and_worst(reward: Float32) -> Int64:
    """Return the positions of the best and the worst sample of each query, shape [query, 2].

    Args:
        reward: Shape [query, sample]. Of equal samples the first is taken.
    """
    return np.stack([reward.argmax(axis=1), reward.argmin(axis=1)], axis=1)


def dpo(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return the DPO loss over all pairs of a query; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards, which order the samples.
        beta: Strength of the KL term.
    """
    k = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    margin = _margins(k)
    loss = _mean_over_pairs(-logsigmoid(beta * margin), reward)
    return ObjectiveOutput(loss=loss, metrics=_pair_metrics(margin, reward, k))


def ipo(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    beta: float,
) -> ObjectiveOutput:
    """Return the IPO loss over all pairs of a query; gradient flows through `log_pi` alone.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards, which order the samples.
        beta: Strength of the KL term: the log-ratios of a pair are driven 1 / (2 beta) apart.
    """
    k = log_ratio(log_pi, log_ref, mask).sum(dim=-1)  # [query, sample]
    margin = _margins(k)
    loss = _mean_over_pairs((margin - 1 / (2 * beta)).square(), reward)
    return ObjectiveOutput(loss=loss, metrics=_pair_metrics(margin, reward, k))


def _margins(k: Float[Tensor, "query sample"]) -> Float[Tensor, "query sample sample"]:
    """Return h = k_i - k_j of every ordered pair (i, j)."""
    return k.unsqueeze(2) - k.unsqueeze(1)


def _mean_over_pairs(
    values: Float[Tensor, "query sample sample"], reward: Float[Tensor, "query sample"]
) -> Float[Tensor, ""]:
    """Return the mean over the pairs with r_i > r_j of a query, then over all queries.

    A query without such a pair counts as zero.
    """
    better = reward.unsqueeze(2) > reward.unsqueeze(1)
    pairs = better.sum(dim=(1, 2)).clamp(min=1)
    return (torch.where(better, values, 0.0).sum(dim=(1, 2)) / pairs).mean()


@torch.no_grad()
def _pair_metrics(
    margin: Float[Tensor, "query sample sample"],
    reward: Float[Tensor, "query sample"],
    k: Float[Tensor, "query sample"],
) -> dict[str, Tensor]:
    """Return the common metrics and the share of a query's pairs that pi / ref orders right.

    A query without a pair counts as zero: divide by 1 - `equal_reward_share` to leave it out.
    """
    accuracy = _mean_over_pairs((margin > 0).to(margin.dtype), reward)
    return reward_metrics(reward, k) | {"pair_accuracy": accuracy}
