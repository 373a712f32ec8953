"""What every objective returns."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """A scalar loss that carries gradient, and detached scalars to report."""

    loss: Tensor
    """Mean over the queries of the (micro-)batch; shape []."""
    metrics: Mapping[str, Tensor]
    """Detached scalars by name, each a mean over queries; shape []."""
