"""Settings of the squared family: residuals of trajectory balance, no ratio."""

from typing import Literal

from tba.config.base import Section
from tba.config.objectives.beta import BetaConfig, ConstantBeta


class TrajectoryBalanceConfig(Section):
    """Trajectory balance with the VarGrad estimate of log Z: equation (5), the TBA loss."""

    kind: Literal["tb"] = "tb"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run."""
