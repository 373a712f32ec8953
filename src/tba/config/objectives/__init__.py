"""The objective: one section a kind, one file a family, as in `tba.objectives`."""

from typing import Annotated, get_args

from pydantic import Field

from tba.config.base import Section
from tba.config.objectives.actor_critic import (
    A3CConfig,
    PPOConfig,
    VinePPOConfig,
    VTraceConfig,
)
from tba.config.objectives.beta import (
    BetaConfig,
    ConstantBeta,
    LinearBeta,
    LinearThenCutBeta,
)
from tba.config.objectives.custom import (
    CustomObjectiveConfig,
)
from tba.config.objectives.imitation import (
    BestOfNConfig,
    MleSmoothingConfig,
    RaftConfig,
    RestConfig,
    SftConfig,
)
from tba.config.objectives.policy_gradient import (
    AsymREConfig,
    ProximalRLOOConfig,
    ReinforceConfig,
    RLOOConfig,
    TOPRConfig,
)
from tba.config.objectives.preference import (
    DpoConfig,
    IpoConfig,
    OnlineDpoConfig,
)
from tba.config.objectives.ratio import (
    CISPOConfig,
    DecoupledPPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    IcePopConfig,
    M2POConfig,
    TISConfig,
)
from tba.config.objectives.squared import (
    AStarPOConfig,
    DROConfig,
    FlowRLConfig,
    FTrajectoryBalanceConfig,
    GVPOConfig,
    KimiConfig,
    LearnedZConfig,
    OPMDConfig,
    SubTrajectoryBalanceConfig,
    TaperedTrajectoryBalanceConfig,
    TrajectoryBalanceConfig,
    TrajectoryBalancePrimeConfig,
)

__all__ = [
    "A3CConfig",
    "AStarPOConfig",
    "AsymREConfig",
    "BestOfNConfig",
    "BetaConfig",
    "CISPOConfig",
    "ConstantBeta",
    "CustomObjectiveConfig",
    "DROConfig",
    "DecoupledPPOConfig",
    "DpoConfig",
    "DrGRPOConfig",
    "FTrajectoryBalanceConfig",
    "FlowRLConfig",
    "GRPOConfig",
    "GSPOConfig",
    "GVPOConfig",
    "IcePopConfig",
    "IpoConfig",
    "KimiConfig",
    "LearnedZConfig",
    "LinearBeta",
    "LinearThenCutBeta",
    "M2POConfig",
    "MleSmoothingConfig",
    "OPMDConfig",
    "ObjectiveConfig",
    "OnlineDpoConfig",
    "PPOConfig",
    "ProximalRLOOConfig",
    "RLOOConfig",
    "RaftConfig",
    "ReinforceConfig",
    "RestConfig",
    "SftConfig",
    "SubTrajectoryBalanceConfig",
    "TISConfig",
    "TOPRConfig",
    "TaperedTrajectoryBalanceConfig",
    "TrajectoryBalanceConfig",
    "TrajectoryBalancePrimeConfig",
    "VTraceConfig",
    "VinePPOConfig",
    "section_of",
]

ObjectiveConfig = Annotated[
    TrajectoryBalanceConfig
    | TrajectoryBalancePrimeConfig
    | TaperedTrajectoryBalanceConfig
    | LearnedZConfig
    | DROConfig
    | FlowRLConfig
    | KimiConfig
    | GVPOConfig
    | OPMDConfig
    | AStarPOConfig
    | FTrajectoryBalanceConfig
    | SubTrajectoryBalanceConfig
    | ReinforceConfig
    | RLOOConfig
    | ProximalRLOOConfig
    | TOPRConfig
    | AsymREConfig
    | GRPOConfig
    | DrGRPOConfig
    | GSPOConfig
    | CISPOConfig
    | TISConfig
    | IcePopConfig
    | M2POConfig
    | DecoupledPPOConfig
    | PPOConfig
    | VinePPOConfig
    | VTraceConfig
    | A3CConfig
    | OnlineDpoConfig
    | DpoConfig
    | IpoConfig
    | SftConfig
    | BestOfNConfig
    | RaftConfig
    | RestConfig
    | MleSmoothingConfig
    | CustomObjectiveConfig,
    Field(discriminator="kind"),
]


def section_of(kind: str) -> type[Section]:
    """Return the section of an objective's kind."""
    members, _ = get_args(ObjectiveConfig)
    sections = {section.model_fields["kind"].default: section for section in get_args(members)}
    return sections[kind]
