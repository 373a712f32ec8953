"""Checkpoints: all that a trainer needs to go on exactly where it was.

    step-00000100/
        policy/                 the policy and its tokenizer, an ordinary Hugging Face folder
        adapter/                with model.lora: the adapter alone, as peft reads it; it is already
                                merged into policy/
        optimizer.safetensors   AdamW's tensors, as `parameter/slot`
        optimizer.json          its parameter groups, with parameters by name
        heads.safetensors       value head and log Z, where the objective learns one
        anchor.safetensors      pi_old, where the objective has one
        reference/              the reference as a Hugging Face folder, once it has been reset
        buffer.safetensors      the buffer's arrays
        state.json              versions, position in the rollout log, totals: `TrainerState`
        MANIFEST.json           size and SHA-256 of each file, written last

A checkpoint is written beside its place and renamed into it when every byte is on the disk, so one
that can be seen is complete, and older ones go only afterwards. Nothing in it is pickled.
"""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor
from torch.optim import Optimizer

from tba.errors import RunFolderError
from tba.policy.adapters import is_adapted, save_adapter, save_merged
from tba.policy.loading import Policy
from tba.records import EvalReport
from tba.run.durable import storage_error, storage_errors, sync_directory
from tba.run.manifest import flaw, seal
from tba.run.summary import Totals

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a trainer stands, apart from its tensors.

    Random streams and query cursors are not among it: they are functions of the seed and of the
    step or the search batch, and which search batches there were is in the rollout log.
    """

    step: int
    """Optimiser steps done: the policy version."""
    reference_version: int
    """Optimiser steps behind the reference; 0 is the initial model."""
    rollout_position: int
    """End of the rollout log in bytes."""
    resumptions: tuple[tuple[int, int], ...]
    """Of each earlier resumption: trajectories in the log, and the step it went on from."""
    searched_pass_at_1: float
    """Accuracy among the newest responses, until others arrive."""
    before: EvalReport | None
    """Accuracy of the initial policy, so that it need not be measured again."""
    totals: Totals
    """What the summary adds up."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk; its tensors are read when asked for."""

    path: Path
    """Its folder."""
    state: TrainerState
    """Where the trainer stood."""

    @property
    def policy(self) -> Path:
        """The policy's Hugging Face folder."""
        return self.path / "policy"

    def restore_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimiser of named parameters the saved state, matched by name.

        Raises:
            RunFolderError: it was saved for other parameters.
        """
        names = [group["param_names"] for group in optimizer.param_groups]
        groups = json.loads((self.path / "optimizer.json").read_text())
        if [group["param_names"] for group in groups] != names:
            raise RunFolderError(
                f"checkpoint {self.path} holds an optimiser of other parameters: resume it with "
                "the model it was saved with"
            )
        index = {name: i for i, name in enumerate(name for group in names for name in group)}
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in safetensors.torch.load_file(self.path / "optimizer.safetensors").items():
            name, _, slot = key.rpartition("/")
            state.setdefault(index[name], {})[slot] = tensor
        optimizer.load_state_dict(
            {
                "state": state,
                "param_groups": [
                    group
                    | {"betas": tuple(group["betas"])}  # JSON has no tuples
                    | {"params": [index[name] for name in group["param_names"]]}
                    for group in groups
                ],
            }
        )

    def reference(self) -> dict[str, Tensor] | None:
        """Return the reference's weights by name, or None while it is the initial model."""
        file = self.path / "reference" / "model.safetensors"
        return safetensors.torch.load_file(file) if file.exists() else None

    def restore_beside_the_policy(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the saved weights of heads and anchor into the given ones."""
        for name, weights in parts.items():
            saved = safetensors.torch.load_file(self.path / f"{name}.safetensors")
            with torch.no_grad():
                for key, weight in weights.items():
                    weight.copy_(saved[key])

    def buffer(self) -> dict[str, NDArray[Any]]:
        """Return the buffer's arrays by name."""
        arrays: dict[str, NDArray[Any]] = safetensors.numpy.load_file(
            self.path / "buffer.safetensors"
        )
        return arrays


def save_checkpoint(
    checkpoints: Path,
    state: TrainerState,
    *,
    policy: Policy,
    optimizer: Optimizer,
    buffer: Mapping[str, NDArray[Any]],
    reference: Mapping[str, Tensor] | None = None,
    beside_the_policy: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write a checkpoint.

    Returns:
        Its folder.

    Raises:
        StorageError: the disk refused it; nothing of it is left, and the older ones are intact.
    """
    final = step_folder(checkpoints, state.step)
    temporary = checkpoints / f"tmp-{final.name}"
    with storage_errors(f"checkpoint {final}"):
        for leftover in checkpoints.glob("tmp-*"):
            shutil.rmtree(leftover)
        try:
            temporary.mkdir(parents=True)
            _write_policy(temporary / "policy", policy)
            if is_adapted(policy.model):
                save_adapter(policy.model, temporary / "adapter")
            _write_optimizer(temporary, optimizer)
            if reference is not None:
                _write_reference(temporary, reference)
            for name, weights in (beside_the_policy or {}).items():
                tensors = {key: weight.contiguous() for key, weight in weights.items()}
                safetensors.torch.save_file(tensors, temporary / f"{name}.safetensors")
            safetensors.numpy.save_file(
                {name: np.asarray(array, order="C") for name, array in buffer.items()},
                temporary / "buffer.safetensors",
            )
            (temporary / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1))
            seal(temporary)
            _put_in_place(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, or will be."""
    return checkpoints / f"step-{step:08d}"


def remove_superseded(
    checkpoints: Path, *, keep: int, until: int, in_use: Path | None = None
) -> None:
    """Keep the newest ones up to step `until`; later ones belong to a future that was given up.

    Args:
        checkpoints: The folder of all.
        keep: How many to keep.
        until: The step just saved.
        in_use: One that somebody reads, which stays besides.

    Raises:
        StorageError: the disk refused it.
    """
    superseded = [path for path in _superseded(checkpoints, keep, until) if path != in_use]
    with storage_errors(f"old checkpoints in {checkpoints}"):
        for path in superseded:
            # under another name first: a checkpoint half removed is not to be seen
            doomed = path.rename(path.with_name(f"tmp-{path.name}"))
            shutil.rmtree(doomed)


def load_newest(
    checkpoints: Path, tell: Callable[[str], None] = lambda text: None
) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None if none was ever made.

    A damaged one is passed over with a warning, in the log and to `tell`, that names the file.

    Raises:
        RunFolderError: there are checkpoints, but none is whole.
    """
    found = _newest_first(checkpoints)
    for path in found:
        damage = flaw(path)
        if damage is None:
            return _open(path)
        warning = f"checkpoint {path} is damaged: {damage}; trying the one before it"
        logger.warning(warning)
        tell(warning)
    if found:
        raise RunFolderError(
            f"none of the {len(found)} checkpoints in {checkpoints} is whole: restore one from a "
            "copy, or begin anew with --clean"
        )
    return None


def steps_kept(checkpoints: Path) -> list[int]:
    """Return the steps of which there are checkpoints, in order; some may be damaged."""
    return sorted({_step(path) for path in _newest_first(checkpoints)})


def load_step(checkpoints: Path, step: int) -> Checkpoint:
    """Return the checkpoint of one step.

    Raises:
        RunFolderError: There is none, or it is damaged.
    """
    found = _newest_first(checkpoints)
    path = next((path for path in found if _step(path) == step), None)
    if path is None:
        there = ", ".join(map(str, steps_kept(checkpoints)))
        raise RunFolderError(
            f"{checkpoints} has no checkpoint of step {step}: it has those of {there or 'no step'}"
        )
    damage = flaw(path)
    if damage is not None:
        raise RunFolderError(f"checkpoint {path} is damaged: {damage}; choose another step")
    return _open(path)


def _open(path: Path) -> Checkpoint:
    state = TypeAdapter(TrainerState).validate_json((path / "state.json").read_bytes())
    return Checkpoint(path, state)


def _write_policy(folder: Path, policy: Policy) -> None:
    save_merged(policy.model, folder)
    try:
        policy.tokenizer.save_pretrained(folder)
    except Exception as error:
        # tokenizers, written in Rust, reports a full disk by a bare Exception.
        if type(error) is not Exception:
            raise
        raise storage_error(f"tokenizer in {folder}", error) from error


def _write_optimizer(folder: Path, optimizer: Optimizer) -> None:
    tensors = {
        f"{name}/{slot}": tensor.contiguous()
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for slot, tensor in optimizer.state.get(parameter, {}).items()
    }
    safetensors.torch.save_file(tensors, folder / "optimizer.safetensors")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    (folder / "optimizer.json").write_text(json.dumps(groups, indent=1))


def _write_reference(folder: Path, reference: Mapping[str, Tensor]) -> None:
    target = folder / "reference"
    target.mkdir()
    shutil.copy(folder / "policy" / "config.json", target)
    tensors = {name: tensor.contiguous() for name, tensor in reference.items()}
    # transformers loads no file that does not say which framework wrote it
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename a checkpoint into its place; one of the same step is put aside, still readable."""
    if final.exists():
        aside = final.with_suffix(".replaced")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    sync_directory(final.parent)


def _newest_first(checkpoints: Path) -> list[Path]:
    """List checkpoints; of one step, the one in its place comes before the one put aside."""
    name = "step-" + "[0-9]" * 8
    found = [*checkpoints.glob(name), *checkpoints.glob(name + ".replaced")]
    return sorted(found, key=lambda path: (_step(path), not path.suffix), reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _superseded(checkpoints: Path, newest: int, until: int) -> Iterator[Path]:
    kept: set[int] = set()
    for path in _newest_first(checkpoints):
        step = _step(path)
        if step > until or step in kept or len(kept) == newest:
            yield path
        else:
            kept.add(step)
