"""Settings of the squared family: residuals of trajectory balance, no ratio but in TBA'."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tba.config.base import Section
from tba.config.objectives.beta import BetaConfig, ConstantBeta
from tba.config.objectives.weight import ConstantWeight, WeightConfig


class TrajectoryBalanceConfig(Section):
    """Trajectory balance with the VarGrad estimate of log Z: equation (5), the TBA loss."""

    kind: Literal["tb"] = "tb"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run."""
    reference_weight: WeightConfig = ConstantWeight()
    """Exponent of the reference in the posterior over the run; other than 1 in red-teaming."""


class TrajectoryBalancePrimeConfig(Section):
    """TBA': the TBA update with a capped token ratio and a clamped token KL."""

    kind: Literal["tb_prime"] = "tb_prime"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta(value=0.005)
    """Strength of the KL term over the run."""
    ratio_cap: PositiveFloat | None = 8.0
    """Largest weight pi / mu of a token; none: every token has weight 1."""
    kl_clamp: PositiveFloat | None = 10.0
    """Largest |log pi - log ref| of a token in the advantage, in nats; none: no limit."""


class TaperedTrajectoryBalanceConfig(Section):
    """Trajectory balance that pushes down only what the policy would still say."""

    kind: Literal["tb_tapered"] = "tb_tapered"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run."""


class LearnedZConfig(Section):
    """Trajectory balance with a learned log Z: equation (3)."""

    kind: Literal["tb_learned_z"] = "tb_learned_z"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run."""
    reference_weight: WeightConfig = ConstantWeight()
    """Exponent of the reference in the posterior over the run; other than 1 in red-teaming."""


class DROConfig(Section):
    """Direct reward optimisation: trajectory balance with a learned value, in reward units."""

    kind: Literal["dro"] = "dro"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run; the policy's gradient shrinks with it."""


class FlowRLConfig(Section):
    """FlowRL: length-normalised trajectory balance with a learned log Z."""

    kind: Literal["flowrl"] = "flowrl"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta(value=0.067)
    """Strength of the KL term over the run, the reciprocal of the paper's (15)."""
    std_epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation of the rewards of a query, in reward units."""


class KimiConfig(Section):
    """Kimi's mirror descent: squared residual against the policy that sampled, mean baseline."""

    kind: Literal["kimi"] = "kimi"
    """Objective kind."""
    tau: PositiveFloat = 0.1
    """Strength of the pull to the policy that sampled."""


class GVPOConfig(Section):
    """GVPO: trajectory balance whose reference is the policy that sampled."""

    kind: Literal["gvpo"] = "gvpo"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta(value=0.1)
    """Strength of the pull to the policy that sampled, over the run."""


class OPMDConfig(Section):
    """OPMD: policy gradient with the mean of the query as baseline, damped, without an anchor."""

    kind: Literal["opmd"] = "opmd"
    """Objective kind."""
    tau: NonNegativeFloat = 1.0
    """Damping: the update is divided by 1 + tau."""


class AStarPOConfig(Section):
    """A*-PO: trajectory balance with a log Z estimated beforehand from the reference."""

    kind: Literal["a_star_po"] = "a_star_po"
    """Objective kind."""
    beta: ConstantBeta = ConstantBeta(value=0.5)
    """Strength of the KL term; constant, because the estimate of log Z is made with it. Where it is
    small, beta log Z is nearly the best reward, and almost every sample is pushed away."""
    reference_samples: PositiveInt = 8
    """Responses of the reference from which log Z of a query is estimated, whenever it is asked."""


class FTrajectoryBalanceConfig(Section):
    """f-trajectory balance: another function of the residual than its square."""

    kind: Literal["f_tb"] = "f_tb"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run."""
    phi: Literal["huber", "linex"] = "huber"
    """Function of the residual: linear beyond the scale, or exponential on one side."""
    scale: float = 10.0
    """Residual at which phi leaves the square, in nats; with linex, above 0 seeks modes, below 0
    covers them."""

    @model_validator(mode="after")
    def _scale_fits_phi(self) -> Self:
        if self.scale == 0 or (self.phi == "huber" and self.scale < 0):
            raise ValueError(
                f"objective.scale is {self.scale} and phi {self.phi}: set a scale above 0 "
                "(or, with phi linex, below 0 to cover modes)"
            )
        return self


class SubTrajectoryBalanceConfig(Section):
    """Modified sub-trajectory balance: every prefix of a response gets a reward."""

    kind: Literal["subtb"] = "subtb"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term over the run."""
    subtb_lambda: float = Field(default=1.0, gt=0, le=1)
    """Weight of a pair of prefixes for each token between them."""
