"""What several objectives would do to one policy on the same batch: losses, gradients, angles.

Gradients are those of the trainer's own step (`tba.update.BatchLoss`), before clipping, over the
policy's trained parameters end to end in float32; learned heads are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from tba.config import Config, ObjectiveConfig
from tba.config.explain import did_you_mean
from tba.config.objectives import section_of
from tba.errors import ConfigError
from tba.objectives import OBJECTIVES, load_objective
from tba.policy.adapters import trained_parameters
from tba.records import Batch
from tba.update import BatchLoss

DEFAULT = ("tb", "tb_prime", "dr_grpo", "grpo", "rloo", "cispo", "tis", "online_dpo")
"""Objectives compared when none is named."""
_LEARNED = ("value", "log_z")
_LOGGED = ("prefix_reward", "log_ref_stop", "step_advantage", "log_z_star")
_CHUNK = 2**20
"""Parameters whose products are summed in float64 at a time."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several objectives on one batch, in the order in which they were asked."""

    loss: Mapping[str, float]
    """By kind."""
    grad_norm: Mapping[str, float]
    """By kind; before clipping."""
    cosine: tuple[tuple[float, ...], ...]
    """Between the gradients of two objectives; not a number where one of them is zero."""


def sections_of(
    asked: Sequence[str] | None, config: Config, *, logged: Sequence[str], saved: Sequence[str]
) -> dict[str, ObjectiveConfig]:
    """Return the settings of each objective, by kind: the run's own for its kind, else defaults.

    Args:
        asked: Kinds, or none for those of `DEFAULT` that can be computed.
        config: The run's.
        logged: What the run's searchers computed besides.
        saved: What the checkpoint holds beside the policy: heads, anchor.

    Raises:
        ConfigError: A kind is unknown, or cannot be computed for this run.
    """
    kinds = dict.fromkeys(asked if asked is not None else DEFAULT)
    if "" in kinds:
        raise ConfigError("--objectives names nothing between its commas: see docs/objectives.md")
    refusals = {kind: _refusal(kind, config, logged=logged, saved=saved) for kind in kinds}
    refused = [refusal for refusal in refusals.values() if refusal is not None]
    if refused and asked is not None:
        raise ConfigError(refused[0])
    return {kind: _section(kind, config) for kind in kinds if refusals[kind] is None}


def compare(
    losses: Mapping[str, BatchLoss], model: PreTrainedModel, batch: Batch, number: int
) -> Comparison:
    """Compute each objective's loss and gradient on a batch, as at optimiser step `number`."""
    parameters = list(trained_parameters(model).values())
    size = sum(parameter.numel() for parameter in parameters)
    gradients = torch.zeros(len(losses), size, device=model.device)  # [objective, parameter]
    found = {}
    for row, (kind, loss) in zip(gradients, losses.items(), strict=True):
        model.zero_grad(set_to_none=True)
        found[kind] = float(loss.backward(batch, number)["loss"])
        _copy_gradient(parameters, row)
    model.zero_grad(set_to_none=True)
    products = _products(gradients)
    norms = np.sqrt(np.diag(products))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = products / np.outer(norms, norms)
    return Comparison(
        loss=found,
        grad_norm=dict(zip(losses, norms.tolist(), strict=True)),
        cosine=tuple(map(tuple, cosine.tolist())),
    )


def _copy_gradient(parameters: Sequence[Tensor], target: Tensor) -> None:
    parts = target.split([parameter.numel() for parameter in parameters])
    for part, parameter in zip(parts, parameters, strict=True):
        if parameter.grad is not None:
            part.copy_(parameter.grad.flatten())


def _products(gradients: Tensor) -> NDArray[np.float64]:
    """Return the scalar products of all pairs of rows, summed in float64."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for part in gradients.split(_CHUNK, dim=1):
        wide = part.double()
        total += (wide @ wide.T).cpu()
    return total.numpy()


def _section(kind: str, config: Config) -> ObjectiveConfig:
    """Return the run's own section for its kind, otherwise the defaults of the kind."""
    return config.objective if kind == config.objective.kind else section_of(kind)()  # type: ignore[return-value]


def _refusal(
    kind: str, config: Config, *, logged: Sequence[str], saved: Sequence[str]
) -> str | None:
    """Return why an objective cannot be computed for a run, in a sentence, or None if it can."""
    known = [*OBJECTIVES, "custom"]
    own = config.objective.kind
    if kind not in known:
        hint = did_you_mean(kind, known)
        return f"--objectives names {kind}, which is no objective{hint}: see docs/objectives.md"
    try:
        objective = load_objective(_section(kind, config))
    except ValidationError:
        return f"--objectives names {kind}, which has no default settings: only a run of it has"
    names = dict.fromkeys([*objective.inputs(), *objective.inputs_of_preparation()])
    if missing := [name for name in names if name in _LOGGED and name not in logged]:
        return (
            f"--objectives names {kind}, which needs {' and '.join(missing)}, but this run of {own}"
            " did not log that: leave it out"
        )
    heads = [name for name in names if name in _LEARNED]
    if heads and (kind != own or "heads" not in saved):
        return (
            f"--objectives names {kind}, which needs a learned {' and '.join(heads)}, but the "
            f"checkpoint of this run of {own} has none of that objective: leave it out"
        )
    if "log_old" in names and "anchor" not in saved:
        return (
            f"--objectives names {kind}, which needs an anchor pi_old, but the checkpoint of this "
            f"run of {own} has none: leave it out"
        )
    return None
