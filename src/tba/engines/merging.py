"""Generates with adapters that were added to the weights: as fast as without them.

    what arrives        A and B of each layer                     `weights`
    what generates      W + (alpha / r) B A, in W's precision     `refresh`

W comes from a frozen model and is never written, so that nothing accumulates over versions.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.engines.torch_engine import TorchEngine
from tba.policy.adapters import changes_of


class MergingEngine(TorchEngine):
    """A `TorchEngine` whose live parameters are those of an adapter; see `Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Sequence[int],
        *,
        base: PreTrainedModel,
        adapter: Mapping[str, Tensor],
        scale: float,
    ) -> None:
        """Generate with a model into which adapters are merged.

        Args:
            model: Generates; a copy of `base`, perhaps with quick forms of its layers.
            eos_ids: Tokens that end a response.
            base: Has the frozen weights; never written.
            adapter: Live tensors named as the trainer publishes them.
            scale: alpha / r.
        """
        super().__init__(model, eos_ids)
        self._adapter = adapter
        self._changes = list(changes_of(adapter, scale, base))

    def weights(self) -> Mapping[str, Tensor]:
        """Return the adapter's tensors by name, in a fixed order."""
        return self._adapter

    @torch.no_grad()
    def refresh(self) -> None:
        """Add the adapter to the base weights, then derive the quick forms."""
        for change in self._changes:
            self._model.get_parameter(f"{change.layer}.weight").copy_(change.added())
        super().refresh()
