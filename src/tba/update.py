"""One optimiser step on a batch: log-probabilities, objective, micro-batches, clipping, AdamW.

The loss of a batch is a mean over its queries, so a micro-batch of whole queries contributes its
own mean times its share of the queries, and the summed gradient is the one-batch gradient. A
sample drawn more than once for a query goes through the model once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tba.config import Config
from tba.objectives import OBJECTIVES
from tba.policy.log_probs import response_log_probs
from tba.records import Batch
from tba.schedules import beta_at, learning_rate_at


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimiser step did."""

    metrics: Mapping[str, float]
    """Scalars by name."""
    skipped: bool
    """Whether loss or gradient were not finite, so that nothing was changed."""


def micro_batches(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Cut a batch into micro-batches of whole queries, at most `token_budget` padded tokens each.

    Queries with responses of similar length go together, so that little of it is padding. A single
    query larger than the budget is a micro-batch of its own.
    """
    rows = np.bincount(batch.query_of_row, minlength=len(batch.prompts))
    longest = np.zeros(len(batch.prompts), dtype=np.int64)
    np.maximum.at(longest, batch.query_of_row, [len(t) for t in batch.tokens])
    prompt = np.array([len(p) for p in batch.prompts])
    chosen: list[int] = []
    for query in np.argsort(longest, kind="stable"):
        wider = [*chosen, int(query)]
        padded = len(wider) * prompt[wider].max() + rows[wider].sum() * longest[wider].max()
        if chosen and padded > token_budget:
            yield batch.select(chosen)
            wider = [int(query)]
        chosen = wider
    yield batch.select(chosen)


class PolicyUpdate:
    """The policy with its optimiser and schedules."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model = model
        self._config = config.trainer
        self._beta = config.objective.beta
        self._objective = OBJECTIVES[config.objective.kind]
        self._temperature = config.search.temperature
        self._autocast = torch.bfloat16 if self._config.precision == "bfloat16" else None
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self._config.learning_rate,
            betas=(self._config.adam_beta1, self._config.adam_beta2),
            eps=self._config.adam_epsilon,
            weight_decay=self._config.weight_decay,
            fused=True,  # one pass over weights and moments
        )

    def step(self, batch: Batch, number: int) -> UpdateResult:
        """Take optimiser step `number` (from 0), unless loss or gradient is not finite."""
        beta = beta_at(self._beta, number, self._config.steps)
        rate = self._config.learning_rate * learning_rate_at(
            self._config.learning_rate_schedule, number, self._config.steps
        )
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for micro in micro_batches(batch, self._config.micro_batch_tokens):
            share = len(micro.prompts) / len(batch.prompts)
            for name, value in self._backward(micro, beta, share).items():
                sums[name] = sums.get(name, 0.0) + share * value
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        names = [*sums, "grad_norm"]
        values = torch.stack([*sums.values(), norm.float()]).tolist()  # the step's one read-back
        metrics = dict(zip(names, values, strict=True))
        skipped = not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return UpdateResult({**metrics, "beta": beta, "learning_rate": rate}, skipped)

    def _backward(self, micro: Batch, beta: float, share: float) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch's share of the loss; return its detached metrics."""
        row_log_pi, row_mask = response_log_probs(
            self.model,
            micro.prompts,
            micro.tokens,
            micro.query_of_row,
            temperature=self._temperature,
            autocast=self._autocast,
        )
        index = torch.from_numpy(micro.index).to(row_log_pi.device)
        log_pi, mask = row_log_pi[index], row_mask[index]  # [row, token] -> [query, sample, token]
        log_ref = _padded(micro.log_ref, row_log_pi)[index]
        log_mu = _padded(micro.log_mu, row_log_pi)[index]
        reward = torch.from_numpy(micro.reward).to(row_log_pi.device)[index]  # [query, sample]
        output = self._objective(log_pi, log_ref, mask, reward, beta=beta)
        (output.loss * share).backward()
        return {
            "loss": output.loss.detach(),
            **output.metrics,
            **_drift(log_pi.detach(), log_mu, mask),
        }


def _padded(rows: tuple[np.ndarray, ...], like: Tensor) -> Float[Tensor, "row token"]:
    """Stack ragged rows into a zero-padded tensor of another's shape and device."""
    padded = np.zeros(tuple(like.shape), dtype=np.float32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded).to(like.device)


def _drift(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> dict[str, Tensor]:
    """Measure how far the policy has moved from the policies that sampled the batch.

    `log_prob_mismatch` is the mean |log pi - log mu| per token; `effective_sample_share` the mean
    over queries of (sum w)^2 / (K sum w^2) with w = pi(y|x) / mu(y|x); `entropy` the mean of -log
    pi per token under the samples.
    """
    tokens = mask.sum()
    log_w = ((log_pi - log_mu) * mask).sum(-1)  # [query, sample]
    w = torch.softmax(log_w, dim=-1)
    return {
        "log_prob_mismatch": ((log_pi - log_mu).abs() * mask).sum() / tokens,
        "effective_sample_share": (1 / (w.square().sum(-1) * w.shape[-1])).mean(),
        "entropy": -(log_pi * mask).sum() / tokens,
    }
