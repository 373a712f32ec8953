"""Settings of the preference family: pairs of samples of a query, sampled or given, by reward."""

from typing import Literal

from tba.config.base import Section
from tba.config.objectives.beta import BetaConfig, ConstantBeta


class OnlineDpoConfig(Section):
    """Online DPO: the best against the worst sample of each query."""

    kind: Literal["online_dpo"] = "online_dpo"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta(value=0.1)
    """Strength of the KL term over the run."""


class DpoConfig(Section):
    """DPO over all pairs of a query's samples with unequal rewards."""

    kind: Literal["dpo"] = "dpo"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta(value=0.1)
    """Strength of the KL term over the run."""


class IpoConfig(Section):
    """IPO over all pairs of a query's samples with unequal rewards."""

    kind: Literal["ipo"] = "ipo"
    """Objective kind."""
    beta: BetaConfig = ConstantBeta(value=0.1)
    """Strength of the KL term over the run; the log-ratios of a pair are driven 1 / (2 beta)
    apart."""
