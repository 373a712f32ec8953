"""Objectives: pure functions from log-probabilities and rewards to a loss, by `objective.kind`."""

from tba.config.objectives import CustomObjectiveConfig, ObjectiveConfig
from tba.objectives.base import INPUTS, Objective, ObjectiveOutput, check_inputs
from tba.objectives.trajectory_balance import trajectory_balance
from tba.references import load_function

__all__ = [
    "INPUTS",
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "load_objective",
    "trajectory_balance",
]

OBJECTIVES = {"tb": Objective(trajectory_balance)}


def load_objective(section: ObjectiveConfig) -> Objective:
    """Return the objective that a section of the configuration chooses.

    Raises:
        ConfigError: A function of the user's own names an input that there is not.
        UserCodeError: It cannot be imported.
    """
    if not isinstance(section, CustomObjectiveConfig):
        return OBJECTIVES[section.kind]
    objective = Objective(load_function(section.function, "objective"))
    check_inputs(objective, section.function)
    return objective
