"""Settings of the imitation family: cross-entropy on demonstrations and on good samples."""

from typing import Literal

from pydantic import Field

from tba.config.base import Section


class SftConfig(Section):
    """Supervised fine-tuning: imitate every sample, whatever its reward."""

    kind: Literal["sft"] = "sft"
    """Objective kind."""


class BestOfNConfig(Section):
    """Best-of-n fine-tuning: imitate the best sample of each query."""

    kind: Literal["best_of_n"] = "best_of_n"
    """Objective kind."""


class RaftConfig(Section):
    """RAFT: imitate the best share of each query's samples."""

    kind: Literal["raft"] = "raft"
    """Objective kind."""
    keep_share: float = Field(default=0.25, gt=0, le=1)
    """Share of a query's samples that is kept, to the nearest sample and at least one."""


class RestConfig(Section):
    """ReST: imitate the samples with a reward above a threshold that moves over the run."""

    kind: Literal["rest"] = "rest"
    """Objective kind."""
    threshold_start: float = 0.0
    """Raw reward that a sample has to exceed at the start of the run."""
    threshold_end: float = 0.9
    """Raw reward that a sample has to exceed at the end of the run; linear in between."""


class MleSmoothingConfig(Section):
    """MLE smoothing: imitate good samples that the reference finds likely enough."""

    kind: Literal["mle_smoothing"] = "mle_smoothing"
    """Objective kind."""
    reward_threshold: float = 0.7
    """Raw reward that a sample has to exceed; of red-teaming, a mean log-probability (-0.36)."""
    log_ref_threshold: float = -100.0
    """Log-probability of the whole response under the reference that a sample has to exceed."""
