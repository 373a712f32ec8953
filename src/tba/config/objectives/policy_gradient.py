"""Settings of the policy gradients on whole responses."""

from typing import Literal

from pydantic import Field, FiniteFloat, PositiveFloat

from tba.config.base import Section
from tba.config.objectives.beta import BetaConfig, ConstantBeta


class ReinforceConfig(Section):
    """REINFORCE: the batch's mean reward as baseline, KL in the reward, no ratio; Williams 1992."""

    kind: Literal["reinforce"] = "reinforce"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term in the reward over the run."""


class RLOOConfig(Section):
    """RLOO: the mean of the query's other samples as baseline, no ratio; arXiv 2402.14740."""

    kind: Literal["rloo"] = "rloo"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term in the reward over the run."""


class ProximalRLOOConfig(Section):
    """Proximal RLOO: RLOO with PPO's clip on the ratio of the response; arXiv 2410.18252."""

    kind: Literal["rloo_proximal"] = "rloo_proximal"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta()
    """Strength of the KL term in the reward over the run."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of a response counts up to 1 +- this."""


class TOPRConfig(Section):
    """TOPR: REINFORCE whose negative responses are weighted by a truncated ratio; 2503.14286."""

    kind: Literal["topr"] = "topr"
    """Objective kind."""
    baseline: FiniteFloat = 0.5
    """Responses of a smaller reward count as negative: half way from wrong to right."""


class AsymREConfig(Section):
    """AsymRE: REINFORCE with a baseline a little below the query's mean; arXiv 2506.20520."""

    kind: Literal["asymre"] = "asymre"
    """Objective kind."""
    delta: PositiveFloat = 0.1
    """How far the baseline lies below the mean reward, in units of reward."""
