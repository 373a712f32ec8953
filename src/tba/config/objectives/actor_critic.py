"""Settings of the objectives with an advantage for every token: PPO, VinePPO, V-trace, A3C."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tba.config.base import Section
from tba.config.objectives.beta import BetaConfig, ConstantBeta


class PPOConfig(Section):
    """PPO: clipped ratios and values, generalised advantages, KL in the reward; 1707.06347."""

    kind: Literal["ppo"] = "ppo"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term in the token rewards over the run."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor of a reward one token later."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Generalised advantage estimate: 0 trusts the values, 1 the rewards."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of a token counts up to 1 +- this."""
    value_clip_range: PositiveFloat = 0.2
    """A value gains nothing by moving further than this from that before the step; as the trainer
    passes over a batch once, before which no value has moved, it never acts."""
    value_coefficient: NonNegativeFloat = 0.1
    """Weight of the value loss."""


class VinePPOConfig(Section):
    """VinePPO: PPO with Monte-Carlo advantages of steps and no critic, arXiv 2410.01679."""

    kind: Literal["vineppo"] = "vineppo"
    """Objective kind."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of a token counts up to 1 +- this."""
    kl_coefficient: NonNegativeFloat = 1e-4
    """Weight of the k3 loss."""
    rollouts_per_prefix: PositiveInt = 9
    """Fresh responses that estimate the value of each prefix."""
    step_separator: str = "\n"
    """Text that ends a step of the response; "" makes every token a step."""


class VTraceConfig(Section):
    """V-trace (IMPALA): values and advantages corrected for stale samples, arXiv 1802.01561."""

    kind: Literal["vtrace"] = "vtrace"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term in the token rewards over the run."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor of a reward one token later."""
    rho_bar: PositiveFloat = 1.0
    """Cap of the ratio in errors and advantages: decides which policy is evaluated."""
    c_bar: PositiveFloat = 1.0
    """Cap of the ratio that passes errors back: decides how fast values are corrected."""
    value_coefficient: NonNegativeFloat = 0.5
    """Weight of the value loss."""


class A3CConfig(Section):
    """A3C: the return of each token less its value, no ratio; arXiv 1602.01783."""

    kind: Literal["a3c"] = "a3c"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term in the token rewards over the run."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor of a reward one token later."""
    value_coefficient: NonNegativeFloat = 0.5
    """Weight of the value loss."""
