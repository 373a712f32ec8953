"""Computes for an objective the inputs it names, and no others.

The objective declares its inputs by the names of its parameters (`tba.objectives.base`); here each
name becomes a tensor over `[query, sample, token]`, for one micro-batch of whole queries or, for
the preparation of an objective, for the whole batch without gradient.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.config import Config
from tba.objectives.base import Objective, declared
from tba.policy.adapters import trained_parameters
from tba.policy.forward import to_device
from tba.policy.heads import Heads
from tba.policy.log_probs import ResponseOutputs, response_outputs
from tba.policy.precision import autocast_dtype
from tba.records import Batch, Float32, Int64

Input = Tensor | float


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the inputs depend on besides the micro-batch."""

    mean_reward: float
    """Mean raw reward of the whole batch."""
    mean_tokens: float
    """Mean number of response tokens of the whole batch's samples."""
    progress: float
    """Share of the optimiser steps that are done."""
    prepared: Mapping[str, Tensor]
    """What the objective's preparation returned; each of shape [query, sample, token]."""

    @classmethod
    def of(cls, batch: Batch, progress: float) -> Self:
        """Return the facts of a whole batch, before its preparation."""
        lengths = np.array([len(tokens) for tokens in batch.tokens])
        return cls(
            mean_reward=float(batch.reward[batch.index].mean(dtype=np.float64)),
            mean_tokens=float(lengths[batch.index].mean()),
            progress=progress,
            prepared={},
        )


class Anchor:
    """A copy of the policy that follows it in jumps: the pi_old of decoupled objectives."""

    def __init__(self, model: PreTrainedModel, every: int) -> None:
        frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
        self.model = copy.deepcopy(model, frozen)  # which the copy shares
        self._every = every

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live parameters that follow the policy, by name."""
        return trained_parameters(self.model)

    @torch.no_grad()
    def follow(self, model: nn.Module, step: int) -> None:
        """Take the policy's weights if optimiser step `step` (from 0) is one to do so."""
        if step % self._every == 0:
            policy = dict(model.named_parameters())
            for name, weight in self.weights().items():
                weight.copy_(policy[name])


class Inputs:
    """The policy with its heads and anchor, seen through the names of an objective's inputs."""

    def __init__(
        self, model: PreTrainedModel, objective: Objective, config: Config, eos_ids: Sequence[int]
    ) -> None:
        self._model = model
        self._objective = objective
        self._temperature = config.search.temperature
        self._autocast = autocast_dtype(config.trainer.precision, model)
        self._max_tokens = config.search.max_completion_length
        self._eos_ids = eos_ids
        names = {*objective.inputs(), *objective.inputs_of_preparation()}
        width = model.config.get_text_config().hidden_size
        self.heads = Heads(width, names, model.device)
        self.anchor = Anchor(model, config.trainer.anchor_every) if "log_old" in names else None

    def of_loss(self, micro: Batch, facts: StepFacts) -> dict[str, Input]:
        """Return the inputs of the loss for a micro-batch, and those of the trainer's metrics."""
        always = ("log_pi", "mask", "log_mu", "log_ref", "reward")
        names = dict.fromkeys([*self._objective.inputs(), *always])
        return self._named(micro, list(names), facts)

    @torch.no_grad()
    def prepare(
        self,
        batch: Batch,
        micros: Sequence[Sequence[int]],
        facts: StepFacts,
        settings: Mapping[str, float],
    ) -> Mapping[str, Tensor]:
        """Return what the objective's preparation makes of the whole batch; mostly nothing."""
        if self._objective.prepare is None:
            return {}
        names = self._objective.inputs_of_preparation()
        parts = [self._named(batch.select(queries), names, facts) for queries in micros]
        longest = max(len(tokens) for tokens in batch.tokens)
        order = np.argsort(np.concatenate([np.asarray(queries) for queries in micros]))
        whole = {name: _joined([part[name] for part in parts], order, longest) for name in names}
        wanted = declared(self._objective.prepare)[1]
        return self._objective.prepare(**whole, **{name: settings[name] for name in wanted})

    def _named(self, micro: Batch, names: Sequence[str], facts: StepFacts) -> dict[str, Input]:
        eos_ids = self._eos_ids if "log_stop" in names else ()
        index = to_device(micro.index, self._model.device)
        outputs = self._outputs(self._model, micro, eos_ids)
        return {name: self._one(name, micro, index, outputs, facts) for name in names}

    def _outputs(
        self, model: PreTrainedModel, micro: Batch, eos_ids: Sequence[int] = ()
    ) -> ResponseOutputs:
        return response_outputs(
            model,
            micro.prompts,
            micro.tokens,
            micro.query_of_row,
            temperature=self._temperature,
            autocast=self._autocast,
            eos_ids=eos_ids,
        )

    def _one(
        self, name: str, micro: Batch, index: Tensor, outputs: ResponseOutputs, facts: StepFacts
    ) -> Input:
        match name:
            case "mean_reward":
                return outputs.log_pi.new_full((), facts.mean_reward)
            case "mean_tokens":
                return facts.mean_tokens
            case "progress":
                return facts.progress
            case "max_tokens":
                return self._max_tokens
            case "log_z":
                return self.heads.log_z(outputs.prompt_means())
        return self._of_rows(name, micro, outputs)[index]  # [row, ...] -> [query, sample, ...]

    def _of_rows(self, name: str, micro: Batch, outputs: ResponseOutputs) -> Tensor:
        like = outputs.log_pi
        match name:
            case "log_pi" | "mask" | "log_stop":
                found: Tensor = getattr(outputs, name)
            case "value":
                found = self.heads.value(outputs.states())
            case "reward" | "finished":
                found = to_device(getattr(micro, name), like.device)
            case "log_ref" | "log_mu":
                found = _padded(getattr(micro, name), like)
            case "log_old":
                assert self.anchor is not None
                with torch.no_grad():
                    found = self._outputs(self.anchor.model, micro).log_pi
            case "log_z_star":
                first = np.array([values[0] for values in micro.extras[name]], dtype=np.float32)
                found = to_device(first, like.device)
            case _:
                found = _padded(micro.extras[name], like)
        return found


def slices(
    prepared: Mapping[str, Tensor], queries: Sequence[int], longest: int
) -> dict[str, Tensor]:
    """Return the part of a preparation that belongs to a micro-batch."""
    return {
        name: values[to_device(np.asarray(queries), values.device), :, :longest]
        for name, values in prepared.items()
    }


def _joined(parts: Sequence[Input], order: Int64, longest: int) -> Input:
    """Put micro-batches together in the order of the batch's queries, padded with zeros."""
    if not isinstance(parts[0], Tensor) or parts[0].ndim == 0:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors[0].ndim == 3:  # [query, sample, token]
        tensors = [nn.functional.pad(part, (0, longest - part.shape[2])) for part in tensors]
    return torch.cat(tensors)[to_device(order, tensors[0].device)]


def _padded(rows: Sequence[Float32], like: Tensor) -> Tensor:
    """Stack ragged rows into a zero-padded tensor of another's shape, [row, token], and device."""
    padded = np.zeros(tuple(like.shape), dtype=np.float32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return to_device(padded, like.device)
