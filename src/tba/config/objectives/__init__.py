"""The objective: one section a kind, one file a family, as in `tba.objectives`."""

from tba.config.objectives.beta import (
    BetaConfig,
    ConstantBeta,
    LinearBeta,
    LinearThenCutBeta,
)
from tba.config.objectives.squared import TrajectoryBalanceConfig

__all__ = [
    "BetaConfig",
    "ConstantBeta",
    "LinearBeta",
    "LinearThenCutBeta",
    "ObjectiveConfig",
    "TrajectoryBalanceConfig",
]

ObjectiveConfig = TrajectoryBalanceConfig
