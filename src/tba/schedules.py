"""Settings of the objective and the learning rate over the run, as pure functions of the step.

Steps count from 0 to `steps` - 1. A decay is laid out so that it would be complete at `steps`, one
after the last step: no step is spent at a learning rate of zero. Nor does warm-up start at zero.
"""

import math
from typing import Any

from tba.config.base import Section
from tba.config.objectives import (
    BetaConfig,
    ConstantBeta,
    CustomObjectiveConfig,
    LinearBeta,
    LinearThenCutBeta,
)
from tba.config.training import ConstantRate, CosineRate, LinearRate, RateConfig


def settings_at(section: Section, step: int, steps: int) -> dict[str, Any]:
    """Return the settings of an objective at one step of the run, its kind left out."""
    schedules = (ConstantBeta, LinearBeta, LinearThenCutBeta)
    if isinstance(section, CustomObjectiveConfig):
        return dict(section.settings)
    values = {name: getattr(section, name) for name in type(section).model_fields if name != "kind"}
    return {
        name: beta_at(value, step, steps) if isinstance(value, schedules) else value
        for name, value in values.items()
    }


def beta_at(config: BetaConfig, step: int, steps: int) -> float:
    """Return the strength of the KL term at one step of the run."""
    if isinstance(config, ConstantBeta):
        return config.value
    end_from = config.end_at if isinstance(config, LinearBeta) else config.cut_at
    if step >= end_from * steps:
        return config.end
    return config.start + (config.end - config.start) * step / (config.end_at * steps)


def learning_rate_at(config: RateConfig, step: int, steps: int) -> float:
    """Return the learning rate at one step of the run, as a factor of its peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if isinstance(config, ConstantRate):
        return 1.0
    left = (steps - step) / (steps - config.warmup_steps)  # 1 after warm-up, 0 at `steps`
    if isinstance(config, LinearRate):
        return left
    if isinstance(config, CosineRate):
        fall = (1 + math.cos(math.pi * (1 - left))) / 2
        return config.final_share + (1 - config.final_share) * fall
    decay_steps = min(config.decay_steps, steps - config.warmup_steps)
    return min(1.0, (steps - step) / max(1, decay_steps))
