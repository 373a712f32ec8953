"""Settings of the ratio family: group advantages and bounded importance ratios."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from tba.config.base import Section


class GRPOConfig(Section):
    """GRPO: PPO's clip with the advantage among a query's samples, arXiv 2402.03300."""

    kind: Literal["grpo"] = "grpo"
    """Objective kind."""
    beta: NonNegativeFloat = 0.04
    """Strength of the k3 term of the loss."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of a token counts up to 1 +- this."""
    std_epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation that divides a query's advantages."""


class DrGRPOConfig(Section):
    """Dr. GRPO: GRPO without division by deviation or length, arXiv 2503.20783."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    """Objective kind."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of a token counts up to 1 +- this."""


class GSPOConfig(Section):
    """GSPO: the clip on the length-normalised ratio of a response, arXiv 2507.18071."""

    kind: Literal["gspo"] = "gspo"
    """Objective kind."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio of a response counts down to 1 - this."""
    clip_high: PositiveFloat = 4e-4
    """The ratio of a response counts up to 1 + this."""
    std_epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation that divides a query's advantages."""


class CISPOConfig(Section):
    """CISPO: capped ratios as weights, a mean over a query's tokens, arXiv 2506.13585."""

    kind: Literal["cispo"] = "cispo"
    """Objective kind."""
    ratio_cap: PositiveFloat = 5.0
    """Largest weight of a token."""


class TISConfig(Section):
    """Truncated importance sampling (AIPO): capped ratios as weights, arXiv 2505.24034."""

    kind: Literal["tis"] = "tis"
    """Objective kind."""
    ratio_cap: PositiveFloat = 2.0
    """Largest weight of a token."""


class IcePopConfig(Section):
    """IcePop: ratios as weights, zero outside a band, arXiv 2510.18855."""

    kind: Literal["icepop"] = "icepop"
    """Objective kind."""
    ratio_low: PositiveFloat = 0.5
    """Smallest ratio of a token that is kept."""
    ratio_high: PositiveFloat = 5.0
    """Largest ratio of a token that is kept."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> Self:
        if self.ratio_low >= self.ratio_high:
            raise ValueError(
                f"objective.ratio_low is {self.ratio_low} and ratio_high {self.ratio_high}, so no "
                "token would be kept: set ratio_low below ratio_high"
            )
        return self


class M2POConfig(Section):
    """M2PO: the ratio surrogate without the tokens of largest |log rho|, arXiv 2510.01161."""

    kind: Literal["m2po"] = "m2po"
    """Objective kind."""
    tau: PositiveFloat = 0.04
    """Largest mean of (log rho)^2 over the tokens of a query that are kept."""


class DecoupledPPOConfig(Section):
    """Decoupled PPO: clipped around an older policy, weighted for the one that sampled."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Objective kind; arXiv 2505.24298."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of a token to the older policy counts up to 1 +- this."""
    weight_cap: PositiveFloat = 5.0
    """Largest weight of a token for having been sampled by another policy."""
