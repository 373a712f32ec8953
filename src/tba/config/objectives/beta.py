"""The strength of the KL term over the run."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from tba.config.base import Section


class ConstantBeta(Section):
    """The same beta at every step."""

    kind: Literal["constant"] = "constant"
    """Schedule kind."""
    value: PositiveFloat = 0.05
    """Strength of the KL term."""


class LinearBeta(Section):
    """Linear from `start` to `end`, then `end`."""

    kind: Literal["linear"] = "linear"
    """Schedule kind."""
    start: PositiveFloat
    """Beta at the first step."""
    end: PositiveFloat
    """Beta from `end_at` on."""
    end_at: float = Field(default=1.0, gt=0, le=1)
    """Share of all steps after which beta is `end`."""


class LinearThenCutBeta(Section):
    """Linear from `start` towards `end` at `end_at`, but set to `end` at `cut_at` already."""

    kind: Literal["linear_then_cut"] = "linear_then_cut"
    """Schedule kind."""
    start: PositiveFloat
    """Beta at the first step."""
    end: PositiveFloat
    """Beta from `cut_at` on."""
    end_at: float = Field(default=0.5, gt=0, le=1)
    """Share of all steps at which the line would reach `end`."""
    cut_at: float = Field(default=0.125, gt=0, le=1)
    """Share of all steps at which beta is set to `end`."""

    @model_validator(mode="after")
    def _cut_before_end(self) -> Self:
        if self.cut_at > self.end_at:
            raise ValueError(
                f"objective.beta.cut_at is {self.cut_at} and end_at {self.end_at}, so the cut "
                "would never "
                "happen: set cut_at at or below end_at"
            )
        return self


BetaConfig = Annotated[ConstantBeta | LinearBeta | LinearThenCutBeta, Field(discriminator="kind")]
