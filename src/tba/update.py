"""One optimiser step on a batch: objective, micro-batches, clipping, AdamW.

    batch --> BatchLoss.backward, or the gradient that the batch brings (A3C) --> clipping, AdamW

The loss of a batch is a mean over its queries, so a micro-batch of whole queries contributes its
own mean times its share of the queries, and the summed gradient is the one-batch gradient. A
sample drawn more than once for a query goes through the model once, and one that the loss is not
of (`Objective.choose`) not at all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.config import Config
from tba.errors import UserCodeError
from tba.inputs import Inputs, StepFacts, slices
from tba.objectives import load_objective
from tba.objectives.base import declared
from tba.objectives.masked import at_responses, log_ratio
from tba.objectives.metrics import distance_to_sampling, reward_metrics
from tba.policy.adapters import trained_parameters
from tba.records import Batch, Gradient
from tba.references import user_code
from tba.schedules import learning_rate_at, settings_at


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimiser step did."""

    metrics: Mapping[str, float]
    """Scalars by name."""
    skipped: bool
    """Whether loss or gradient were not finite, so that nothing was changed."""


def micro_batches(batch: Batch, token_budget: int) -> Iterator[list[int]]:
    """Cut a batch into micro-batches of whole queries, at most `token_budget` tokens each.

    Yields positions of queries; `Batch.select` makes the micro-batch.

    What counts is what is computed: each prompt once, and of each response all tokens but the last.
    Queries with responses of similar length go together, so that their attention has little
    padding. A single query larger than the budget is a micro-batch of its own.
    """
    inputs = np.array([len(tokens) - 1 for tokens in batch.tokens])
    longest = np.zeros(len(batch.prompts), dtype=np.int64)
    np.maximum.at(longest, batch.query_of_row, inputs)
    cost = np.array([len(prompt) for prompt in batch.prompts])
    np.add.at(cost, batch.query_of_row, inputs)
    chosen: list[int] = []
    spent = 0
    for query in np.argsort(longest, kind="stable").tolist():
        if chosen and spent + cost[query] > token_budget:
            yield chosen
            chosen, spent = [], 0
        chosen.append(query)
        spent += cost[query]
    yield chosen


class BatchLoss:
    """The objective on the policy, with the heads and the anchor that it asks for."""

    def __init__(self, model: PreTrainedModel, config: Config, eos_ids: Sequence[int] = ()) -> None:
        self._model = model
        self._config = config.trainer
        self._section = config.objective
        self._objective = load_objective(config.objective)
        self._inputs = Inputs(model, self._objective, config, eos_ids)
        self.heads = self._inputs.heads

    @property
    def gradients_are_sent(self) -> bool:
        """Whether searchers compute the gradient, and the trainer only applies it."""
        return self._objective.sends_gradients

    def published(self) -> dict[str, Tensor]:
        """Return the live weights that searchers need, by name.

        They are those of the policy that are trained (of adapters, where it has any), and those of
        the heads where searchers compute gradients.
        """
        weights = trained_parameters(self._model)
        if self.gradients_are_sent:
            weights |= self.heads.named_parameters(prefix="heads")
        return weights

    def beside_the_policy(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the live weights of heads and anchor, where there are any; for checkpoints."""
        heads, anchor = dict(self.heads.named_parameters()), self._inputs.anchor
        parts = {"heads": heads, "anchor": anchor.weights() if anchor else {}}
        return {name: weights for name, weights in parts.items() if weights}

    def settings(self, number: int) -> dict[str, Any]:
        """Return the settings of the objective at optimiser step `number` (from 0)."""
        return settings_at(self._section, number, self._config.steps)

    def backward(self, batch: Batch, number: int) -> dict[str, Tensor]:
        """Add the gradient of the batch's loss at step `number`; return its detached metrics."""
        if self._inputs.anchor is not None:
            self._inputs.anchor.follow(self._model, number)
        settings, progress = self.settings(number), number / self._config.steps
        facts = StepFacts.of(batch, progress)
        reward = batch.reward[batch.index]
        of_all = reward_metrics(torch.from_numpy(reward).to(self._model.device, non_blocking=True))
        if self._objective.choose is not None:
            batch = batch.narrow(self._objective.choose(reward))
        micros = list(micro_batches(batch, self._config.micro_batch_tokens))
        prepared = self._inputs.prepare(batch, micros, facts, settings)
        sums: dict[str, Tensor] = {}
        for queries in micros:
            micro = batch.select(queries)
            longest = max(len(tokens) for tokens in micro.tokens)
            own = replace(facts, prepared=slices(prepared, queries, longest))
            share = len(queries) / len(batch.prompts)
            for name, value in self._backward(micro, own, settings, share).items():
                sums[name] = sums.get(name, 0.0) + share * value
        return {**sums, **of_all}

    def _backward(
        self, micro: Batch, facts: StepFacts, settings: Mapping[str, float], share: float
    ) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch's share of the loss; return its detached metrics."""
        inputs = {**self._inputs.of_loss(micro, facts), **facts.prepared}
        names, wanted = declared(self._objective.loss)
        output = self._objective.loss(
            *(inputs[name] for name in names), **{k: v for k, v in settings.items() if k in wanted}
        )
        self._differentiate(output.loss * share)
        drift = _drift(
            *(torch.as_tensor(inputs[name]) for name in ("log_pi", "log_mu", "log_ref", "mask"))
        )
        own = {name: torch.as_tensor(value) for name, value in output.metrics.items()}
        return {**own, **drift, "loss": output.loss.detach()}

    def _differentiate(self, loss: Tensor) -> None:
        """Add the gradient of a loss; that of a user's own may fail, or have nothing to do here."""
        source = self._objective.user_source
        if not source:
            loss.backward()
            return
        with user_code(f"the gradient of the objective {source} failed"):
            loss.backward()
        if all(weight.grad is None for weight in self._model.parameters()):
            raise UserCodeError(
                f"the loss of the objective {source} does not depend on the policy: compute it "
                "from log_pi"
            )


class PolicyUpdate:
    """The policy with its objective, optimiser and schedules."""

    def __init__(self, model: PreTrainedModel, config: Config, eos_ids: Sequence[int] = ()) -> None:
        self.model = model
        self._config = config.trainer
        self._loss = BatchLoss(model, config, eos_ids)
        heads = self._loss.heads.named_parameters(prefix="heads")
        groups = [
            {"params": list(trained_parameters(model).items()), "lr": self._config.learning_rate},
            {"params": list(heads), "lr": self._config.head_learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(self._config.adam_beta1, self._config.adam_beta2),
            eps=self._config.adam_epsilon,
            weight_decay=self._config.weight_decay,
            fused=True,  # one pass over weights and moments
        )
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def gradients_are_sent(self) -> bool:
        """Whether searchers compute the gradient, so that every batch must bring its own."""
        return self._loss.gradients_are_sent

    def published(self) -> dict[str, Tensor]:
        """Return the live weights that searchers need, by name."""
        return self._loss.published()

    def beside_the_policy(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the live weights of heads and anchor, where there are any; for checkpoints."""
        return self._loss.beside_the_policy()

    def step(self, batch: Batch, number: int) -> UpdateResult:
        """Take optimiser step `number` (from 0), unless loss or gradient is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self._clipped_gradient(batch, number)
        skipped = not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
        rate = learning_rate_at(self._config.learning_rate_schedule, number, self._config.steps)
        if not skipped:
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * rate
            self.optimizer.step()
        metrics["learning_rate"] = self._config.learning_rate * rate
        if "beta" in (settings := self._loss.settings(number)):
            metrics["beta"] = settings["beta"]
        return UpdateResult(metrics, skipped)

    def _clipped_gradient(self, batch: Batch, number: int) -> dict[str, float]:
        """Leave the clipped gradient of the batch's loss; return its metrics."""
        if batch.gradient is None:
            sums = self._loss.backward(batch, number)
        else:
            sums = self._take(batch.gradient)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        if heads := list(self._loss.heads.parameters()):
            nn.utils.clip_grad_norm_(heads, self._config.max_grad_norm)
        names = [*sums, "grad_norm"]
        values = torch.stack([*sums.values(), norm.float()]).tolist()  # the step's one read-back
        return dict(zip(names, values, strict=True))

    def _take(self, gradient: Gradient) -> dict[str, Tensor]:
        """Put a gradient that was sent in the place of our own; return its metrics."""
        for name, weight in self.published().items():
            weight.grad = torch.from_numpy(gradient.of[name]).to(weight.device, copy=True)
        device = self.model.device
        return {name: torch.tensor(v, device=device) for name, v in gradient.metrics.items()}


@torch.no_grad()
def _drift(
    log_pi: Float[Tensor, "query sample token"],
    log_mu: Float[Tensor, "query sample token"],
    log_ref: Float[Tensor, "query sample token"],
    mask: Bool[Tensor, "query sample token"],
) -> dict[str, Tensor]:
    """Measure how far the policy has moved, from the sampling policies and from the reference.

    All are means over queries: those of `distance_to_sampling`, `kl`, log pi(y|x) - log ref(y|x) of
    a sample, and `entropy`, -log pi a token of the query.
    """
    distance = distance_to_sampling(log_pi, log_mu, mask)
    entropy = -at_responses(log_pi, mask).sum((1, 2)) / mask.sum((1, 2))  # [query]
    return {
        **{name: values.mean() for name, values in distance.items()},
        "kl": log_ratio(log_pi, log_ref, mask).sum(-1).mean(),
        "entropy": entropy.mean(),
    }
