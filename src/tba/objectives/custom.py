"""An objective of the user's own: loaded from a file, checked, and its failures named."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tba.config.objectives import CustomObjectiveConfig
from tba.errors import ConfigError, UserCodeError
from tba.objectives.base import Objective, ObjectiveOutput, check_inputs, declared
from tba.references import load_function, user_code

_OF_OTHERS = {"step_advantage": "vineppo", "log_z_star": "a_star_po"}
"""Inputs that depend on settings of one kind."""

_RESERVED = ("step", "time")
"""What a line of metrics is known by."""


def load_custom(section: CustomObjectiveConfig) -> Objective:
    """Return the function that the section names as an objective.

    Raises:
        ConfigError: It names an input that there is not, or a setting has no value.
        UserCodeError: It cannot be imported.
    """
    function = load_function(section.function, "objective")
    try:
        inspect.signature(function)
    except ValueError as error:
        raise ConfigError(
            f"the objective {section.function} does not say what its parameters are: write a "
            "function in Python around it"
        ) from error
    objective = Objective(_watched(function, section.function), user_source=section.function)
    check_inputs(objective, section.function)
    for name, kind in _OF_OTHERS.items():
        if name in objective.inputs():
            raise ConfigError(
                f"the objective {section.function} asks for {name}, which searchers compute for "
                f"objective.kind = {kind} alone: do without it"
            )
    _check_settings(function, section.function, section.settings)
    return objective


def _check_settings(function: Callable[..., Any], name: str, given: Collection[str]) -> None:
    settings = declared(function)[1]
    for setting in given:
        if setting not in settings:
            raise ConfigError(
                f"objective.settings names {setting}, but {name} has no such parameter behind its "
                f"star: it has {', '.join(settings) or 'none'}"
            )
    for setting in settings:
        default = inspect.signature(function).parameters[setting].default
        if default is inspect.Parameter.empty and setting not in given:
            raise ConfigError(
                f"the objective {name} needs a value for {setting}: set "
                f"objective.settings.{setting}, or give the parameter a default"
            )


def _watched(function: Callable[..., Any], name: str) -> Callable[..., ObjectiveOutput]:
    """Wrap the function so that what goes wrong in it comes out as one sentence."""

    @functools.wraps(function)  # its signature declares what it needs
    def watched(*inputs: Any, **settings: Any) -> ObjectiveOutput:
        with user_code(f"the objective {name} failed"):
            output = function(*inputs, **settings)
        if not isinstance(output, ObjectiveOutput):
            raise UserCodeError(
                f"the objective {name} returned a {type(output).__name__}, expected "
                "tba.objectives.ObjectiveOutput(loss=..., metrics={...})"
            )
        loss = output.loss
        if not isinstance(loss, Tensor) or loss.ndim > 0 or not loss.requires_grad:
            raise UserCodeError(
                f"the objective {name} returned a loss that is no scalar tensor with gradient: "
                "make it a mean over queries of something computed from log_pi"
            )
        if not loss.is_floating_point():
            raise UserCodeError(
                f"the objective {name} returned a loss of {loss.dtype}: make it a real number"
            )
        if not isinstance(output.metrics, Mapping):
            raise UserCodeError(
                f"the objective {name} returned a {type(output.metrics).__name__} as metrics, "
                "expected a dictionary of numbers by name"
            )
        metrics = {key: _scalar(value, key, name) for key, value in output.metrics.items()}
        return ObjectiveOutput(loss, {key: value.to(loss) for key, value in metrics.items()})

    return watched


def _scalar(value: object, key: str, name: str) -> Tensor:
    """Return a metric as a detached scalar tensor."""
    if key in _RESERVED:
        raise UserCodeError(
            f"the objective {name} calls a metric {key}, which every line has: rename it"
        )
    if isinstance(value, int | float):
        with suppress(OverflowError):  # an integer that no float can hold is no number here
            return torch.tensor(float(value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).float()
    raise UserCodeError(
        f"the metric {key} of the objective {name} is no single number: give its mean over queries"
    )
