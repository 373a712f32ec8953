"""Objectives: pure functions from log-probabilities and rewards to a loss, by `objective.kind`."""

from tba.objectives.base import ObjectiveOutput
from tba.objectives.trajectory_balance import trajectory_balance

__all__ = ["OBJECTIVES", "ObjectiveOutput", "trajectory_balance"]

OBJECTIVES = {"tb": trajectory_balance}
