r"""Imitation: supervised fine-tuning, best-of-n, RAFT, ReST and MLE smoothing.

    SFT             L = mean over all response tokens of the batch of - log pi(y_ijt|x_i, y_ij<t)
    the others      L = mean_i mean_{j kept} ( - sum_t log pi(y_ijt|x_i) )

    best-of-n       the sample of the highest reward
    RAFT            the share `keep_share` of the K samples with the highest rewards
    ReST            samples with a reward above a threshold, which moves linearly over the run
    MLE smoothing   samples with a reward above a threshold that the reference finds likely enough

Sources: SFT is the usual token mean of Transformers and TRL, end-of-sequence token included and
prompts left out. RAFT is "RAFT: Reward rAnked FineTuning for Generative Foundation Model
Alignment", arXiv 2304.06767, best-of-n fine-tuning its case of one kept sample. ReST is "Reinforced
Self-Training (ReST) for Language Modeling", arXiv 2308.08998, with its filter r > tau. MLE
smoothing is the second stage of "Learning diverse attacks on large language models for robust
red-teaming and safety tuning", arXiv 2405.18540: reward log-scores above a threshold, log ref above
-100.

SFT imitates every sample, whatever its reward. Its sum over a micro-batch is divided by the tokens
of the whole batch, not by its own, so that micro-batches of unequal lengths add up to the batch.

Rewards only choose samples, so nothing flows through them, nor through the reference. There is no
KL term and no ratio to the policy that sampled: the minimiser is the distribution of the kept
samples, whoever sampled them.

How it differs from the papers: the kept samples of a query share a weight of one, so that a query
counts once however many of its samples are kept, and the loss is a plain mean over queries, which
makes micro-batches of whole queries exact. A query of which nothing is kept contributes zero loss
and gradient. Equal rewards at the border of the best share the places that are left equally, which
is the mean over random tie-breaking and does not depend on the order of samples.
"""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from tba.objectives.base import ObjectiveOutput
from tba.objectives.masked import at_responses
from tba.objectives.metrics import reward_metrics


def sft(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    mean_tokens: float,
) -> ObjectiveOutput:
    """Return the cross-entropy of all samples, in nats a response token of the whole batch.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        mask: True at response tokens, false at padding, whose values are ignored.
        mean_tokens: Mean number of response tokens of the samples of the whole batch.
    """
    of_samples = -at_responses(log_pi, mask).sum(dim=-1)  # [query, sample]
    return ObjectiveOutput(loss=of_samples.mean() / mean_tokens, metrics={})


def best_of_n(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
) -> ObjectiveOutput:
    """Return the cross-entropy of the best sample of each query, the mean over equally good ones.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; with equal ones all samples are imitated.
    """
    loss = _cross_entropy(log_pi, mask, _places_of_best(reward, 1))
    return ObjectiveOutput(loss=loss, metrics=reward_metrics(reward))


def raft(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    keep_share: float,
) -> ObjectiveOutput:
    """Return the mean cross-entropy of the best samples of each query.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards; with equal ones all samples are imitated.
        keep_share: Share of a query's samples that is kept, to the nearest sample, at least one.
    """
    places = max(1, round(keep_share * reward.shape[1]))
    loss = _cross_entropy(log_pi, mask, _places_of_best(reward, places))
    return ObjectiveOutput(loss=loss, metrics=reward_metrics(reward))


def rest(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    progress: float,
    *,
    threshold_start: float,
    threshold_end: float,
) -> ObjectiveOutput:
    """Return the mean cross-entropy of the samples above the threshold of this step.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        progress: Share of the run that is done, 0 to 1.
        threshold_start: Reward to exceed at the start of the run.
        threshold_end: Reward to exceed at its end; linear in between.
    """
    threshold = threshold_start + (threshold_end - threshold_start) * progress
    kept = reward > threshold
    loss = _cross_entropy(log_pi, mask, kept)
    return ObjectiveOutput(loss=loss, metrics=reward_metrics(reward) | _kept_share(kept))


def mle_smoothing(
    log_pi: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    reward: Float[Tensor, "query sample"],
    *,
    reward_threshold: float,
    log_ref_threshold: float,
) -> ObjectiveOutput:
    """Return the mean cross-entropy of the good samples that are likely under the reference.

    Args:
        log_pi: Log-probabilities of the response tokens under the policy being trained.
        log_ref: The same under the reference.
        mask: True at response tokens, false at padding, whose values are ignored.
        reward: Raw rewards.
        reward_threshold: Reward to exceed.
        log_ref_threshold: Sum of log ref over the response to exceed.
    """
    ref = at_responses(log_ref.detach(), mask).sum(dim=-1)  # [query, sample]
    kept = (reward > reward_threshold) & (ref > log_ref_threshold)
    loss = _cross_entropy(log_pi, mask, kept)
    kl = at_responses(log_pi.detach(), mask).sum(dim=-1) - ref
    return ObjectiveOutput(loss=loss, metrics=reward_metrics(reward, kl) | _kept_share(kept))


def _cross_entropy(
    log_pi: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
    kept: Shaped[Tensor, "query sample"],
) -> Float[Tensor, ""]:
    """Return the mean over queries of the mean of -log pi(y|x) over the kept samples.

    `kept` says which samples are kept, as truth values or as places, of which a sample may have a
    part; a query without any counts as zero.
    """
    log_likelihood = at_responses(log_pi, mask).sum(dim=-1)  # [query, sample]
    places = kept.detach().to(log_likelihood.dtype)
    weights = places / places.sum(dim=1, keepdim=True).clamp(min=1)
    return -(weights * log_likelihood).sum(dim=1).mean()


def _places_of_best(
    reward: Float[Tensor, "query sample"], places: int
) -> Float[Tensor, "query sample"]:
    """Return the places of the highest rewards; ties at the border share those that are left."""
    reward = reward.detach().to(torch.promote_types(reward.dtype, torch.float32))
    border = reward.topk(places, dim=1).values[:, -1:]  # the lowest reward with a place, [query, 1]
    above = (reward > border).to(reward.dtype)
    tied = (reward == border).to(reward.dtype)
    left = places - above.sum(dim=1, keepdim=True)
    return above + tied * left / tied.sum(dim=1, keepdim=True)


def _kept_share(kept: Bool[Tensor, "query sample"]) -> dict[str, Tensor]:
    """Return the share of samples that are imitated."""
    return {"kept_share": kept.float().mean()}
