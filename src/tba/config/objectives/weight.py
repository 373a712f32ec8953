"""The weight of the reference in what a policy is trained towards, over the run."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from tba.config.objectives.beta import ConstantBeta, LinearBeta


class ConstantWeight(ConstantBeta):
    """The same weight at every step."""

    value: PositiveFloat = 1.0
    """Exponent of the reference in the policy's target, ref^weight exp(reward / beta) / Z."""


class LinearWeight(LinearBeta):
    """Linear from `start` to `end`, then `end`."""

    start: PositiveFloat
    """Weight at the first step."""
    end: PositiveFloat
    """Weight from `end_at` on."""
    kind: Literal["linear"] = "linear"
    """Schedule kind."""
    end_at: float = Field(default=1.0, gt=0, le=1)
    """Share of all steps after which the weight is `end`."""


WeightConfig = Annotated[ConstantWeight | LinearWeight, Field(discriminator="kind")]
