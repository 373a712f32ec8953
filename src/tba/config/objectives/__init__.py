"""The objective: one section a kind, one file a family, as in `tba.objectives`."""

from typing import Annotated

from pydantic import Field

from tba.config.objectives.beta import (
    BetaConfig,
    ConstantBeta,
    LinearBeta,
    LinearThenCutBeta,
)
from tba.config.objectives.custom import CustomObjectiveConfig
from tba.config.objectives.squared import TrajectoryBalanceConfig

__all__ = [
    "BetaConfig",
    "ConstantBeta",
    "CustomObjectiveConfig",
    "LinearBeta",
    "LinearThenCutBeta",
    "ObjectiveConfig",
    "TrajectoryBalanceConfig",
]

ObjectiveConfig = Annotated[
    TrajectoryBalanceConfig | CustomObjectiveConfig, Field(discriminator="kind")
]
