"""Reference resets (rho): every so many steps the reference becomes the policy.

A sample's reference log-probabilities are made where the sample is found, and carry the version of
the reference. After a reset, samples of an older reference are scored anew when they are drawn, so
that no batch ever mixes references.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.policy.loading import load_policy
from tba.policy.reference import Reference
from tba.records import Batch
from tba.sync import WeightStore


class ReferenceResets:
    """The trainer's own copy of the reference, and the wire that gives it to the searchers."""

    def __init__(
        self, reference: Reference, store: WeightStore, *, every: int, version: int
    ) -> None:
        self.reference = reference
        self.store = store
        self._every = every
        self.version = version
        """Version of the policy that is now the reference."""

    def publish(self) -> None:
        """Give the present reference to the searchers."""
        self.store.publish(self.reference.weights(), self.version)

    def due(self, version: int) -> bool:
        """Return whether the policy of this version becomes the reference."""
        return version % self._every == 0

    def reset(self, model: nn.Module, version: int) -> None:
        """Make the policy the reference, here and at the searchers."""
        policy = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self.reference.weights().items():
                weight.copy_(policy[name])
        self.version = version
        self.publish()

    def refresh(self, batch: Batch, buffer: ReplayBuffer) -> Batch:
        """Score the rows of an older reference anew, in the batch and in the buffer."""
        return refreshed(batch, buffer, self.reference, self.version)


def refreshed(batch: Batch, buffer: ReplayBuffer, reference: Reference, version: int) -> Batch:
    """Score the rows that have no log-probabilities of this reference, here and in the buffer."""
    stale = np.flatnonzero(batch.reference_version != version)
    if len(stale) == 0:
        return batch
    fresh = reference.log_ref(
        batch.prompts, [batch.tokens[row] for row in stale], batch.query_of_row[stale]
    )
    buffer.set_log_ref(batch.slots[stale], fresh, version)
    log_ref = list(batch.log_ref)
    for row, values in zip(stale, fresh, strict=True):
        log_ref[row] = values
    return replace(
        batch,
        log_ref=tuple(log_ref),
        reference_version=np.full_like(batch.reference_version, version),
    )


def load_reference(
    initial: str, config: Config, *, device: torch.device, saved: Mapping[str, Tensor] | None
) -> Reference:
    """Load the initial model as the reference and give it the saved weights, if there are any."""
    dtype = getattr(torch, config.search.dtype)
    policy = load_policy(initial, config.model, device=device, dtype=dtype)
    reference = Reference(
        policy.model,
        temperature=config.search.temperature,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
    )
    if saved is not None:
        with torch.no_grad():
            for name, weight in reference.weights().items():
                weight.copy_(saved[name])
    return reference
