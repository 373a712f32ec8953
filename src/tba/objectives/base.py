"""The contract of an objective: a pure function from tensors to a loss.

    def objective(log_pi, log_ref, mask, reward, *, beta):
        ...
        return ObjectiveOutput(loss=loss, metrics={"name": scalar})

What it needs it declares by the names of its positional parameters, which are those of `INPUTS`;
the trainer's rails compute just these. Parameters after the star are its settings, named as the
fields of its section of the configuration. The loss is a mean over queries, so that it can be
computed in micro-batches of whole queries; gradient flows through the inputs marked so.

A quantity that depends on the whole batch, such as whitened advantages, comes from a *preparation*:
a second function of the same form, called once a step without gradient on the whole batch, whose
results are inputs of the loss by the names it gives them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tba.errors import ConfigError
from tba.records import Float32, Int64

INPUTS: Mapping[str, str] = {
    "log_pi": "log-probabilities under the policy, with gradient; [query, sample, token]",
    "mask": "true at response tokens; [query, sample, token]",
    "reward": "raw rewards; [query, sample]",
    "finished": "whether the response ended by itself; [query, sample]",
    "log_ref": "log-probabilities under the reference; [query, sample, token]",
    "log_mu": "log-probabilities under the policy that sampled; [query, sample, token]",
    "log_old": "log-probabilities under the anchor, a policy some steps old; "
    "[query, sample, token]",
    "value": "value head at the state before each token, with gradient; [query, sample, token]",
    "log_z": "learned scalar of each query, with gradient; [query]",
    "log_stop": "log-probability of ending before each token under the policy, with gradient; "
    "[query, sample, token]",
    "log_ref_stop": "the same under the reference; [query, sample, token]",
    "prefix_reward": "reward of the response ended before each token; [query, sample, token]",
    "step_advantage": "Monte-Carlo advantage of each token's step; [query, sample, token]",
    "log_z_star": "log Z estimated from samples of the reference; [query, sample]",
    "mean_reward": "mean raw reward of the whole batch; []",
    "mean_tokens": "mean number of response tokens of the whole batch's samples; a number",
    "max_tokens": "longest allowed completion, in tokens; a number",
    "progress": "share of the optimiser steps that are done; a number",
}
"""What an objective or a preparation may name, with its meaning and shape."""


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """A scalar loss that carries gradient, and detached scalars to report."""

    loss: Tensor
    """Mean over the queries of the (micro-)batch; shape []."""
    metrics: Mapping[str, Tensor | float]
    """Detached scalars by name, each a mean over queries; shape []."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss with the preparation it may have."""

    loss: Callable[..., ObjectiveOutput]
    """The pure function."""
    prepare: Callable[..., Mapping[str, Tensor]] | None = None
    """Called on the whole batch without gradient; returns further inputs of the loss by name, each
    of shape [query, sample, token]."""
    prepared: tuple[str, ...] = ()
    """Names of what `prepare` returns."""
    choose: Callable[[Float32], Int64] | None = None
    """Returns, from the raw rewards, shape [query, sample], the positions of those samples that the
    loss is of, [query, chosen]; the others do not go through the model. None: it is of all."""
    user_source: str = ""
    """Where a function of the user's own comes from; nothing for those of this package."""
    sends_gradients: bool = False
    """Whether searchers compute the gradient, with their own weights, and send it (A3C)."""

    def inputs(self) -> tuple[str, ...]:
        """Return the inputs that the loss names, those of the preparation left out."""
        return tuple(name for name in declared(self.loss)[0] if name not in self.prepared)

    def inputs_of_preparation(self) -> tuple[str, ...]:
        """Return the inputs that the preparation names."""
        return declared(self.prepare)[0] if self.prepare is not None else ()


def declared(function: Callable[..., object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a function's inputs and of its settings, in its order."""
    parameters = inspect.signature(function).parameters.values()
    settings = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.name not in settings), settings


def check_inputs(objective: Objective, name: str) -> None:
    """Refuse an objective that names what there is not.

    Raises:
        ConfigError: It names an unknown input.
    """
    for needed in (*objective.inputs(), *objective.inputs_of_preparation()):
        if needed not in INPUTS:
            raise ConfigError(
                f"the objective {name} asks for an input {needed}, which does not exist: name "
                f"some of {', '.join(INPUTS)}, and put settings behind a star"
            )
