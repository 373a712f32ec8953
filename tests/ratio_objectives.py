"""The objectives with ratios, policy gradients and values by kind, and a batch for them all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tba.config.base import Section
from tba.config.objectives import actor_critic as ac_config
from tba.config.objectives import policy_gradient as pg_config
from tba.config.objectives import ratio as ratio_config
from tba.objectives import actor_critic, group_relative, importance, policy_gradient, proximal
from tba.objectives.base import Objective, declared

BATCH_ONLY = ("max_tokens", "mean_reward")


@dataclass(frozen=True)
class Case:
    """An objective, settings that clip some tokens of `batch()`, and its section."""

    loss: Callable[..., Any]
    settings: Mapping[str, float]
    config: type[Section]
    prepare: Callable[..., Any] | None = None
    prepared: tuple[str, ...] = ()
    preparation: Mapping[str, float] = field(default_factory=dict)
    searcher: tuple[str, ...] = ()
    """Fields of the section that the searcher reads."""

    @property
    def objective(self):
        return Objective(self.loss, self.prepare, self.prepared)

    def arguments(self, inputs):
        """Choose and prepare what the loss names."""
        given = dict(inputs)
        if self.prepare is not None:
            names = declared(self.prepare)[0]
            with torch.no_grad():
                given |= self.prepare(*(inputs[name] for name in names), **self.preparation)
        return {name: given[name] for name in declared(self.loss)[0]}

    def of(self, arguments):
        return self.loss(**arguments, **self.settings)

    def __call__(self, inputs):
        return self.of(self.arguments(inputs))


_G, _I, _P, _X, _A = group_relative, importance, policy_gradient, proximal, actor_critic
CASES = {
    "grpo": Case(
        _G.grpo, {"beta": 0.1, "clip_range": 0.2, "std_epsilon": 1e-4}, ratio_config.GRPOConfig
    ),
    "dr_grpo": Case(_G.dr_grpo, {"clip_range": 0.2}, ratio_config.DrGRPOConfig),
    "gspo": Case(
        _G.gspo,
        {"clip_low": 0.05, "clip_high": 0.06, "std_epsilon": 1e-4},
        ratio_config.GSPOConfig,
    ),
    "cispo": Case(_I.cispo, {"ratio_cap": 1.2}, ratio_config.CISPOConfig),
    "tis": Case(_I.tis, {"ratio_cap": 1.2}, ratio_config.TISConfig),
    "icepop": Case(_I.icepop, {"ratio_low": 0.8, "ratio_high": 1.3}, ratio_config.IcePopConfig),
    "m2po": Case(_I.m2po, {"tau": 0.04}, ratio_config.M2POConfig),
    "decoupled_ppo": Case(
        _I.decoupled_ppo, {"clip_range": 0.2, "weight_cap": 1.2}, ratio_config.DecoupledPPOConfig
    ),
    "reinforce": Case(_P.reinforce, {"beta": 0.3}, pg_config.ReinforceConfig),
    "rloo": Case(_P.rloo, {"beta": 0.3}, pg_config.RLOOConfig),
    "rloo_proximal": Case(
        _P.rloo_proximal, {"beta": 0.3, "clip_range": 0.2}, pg_config.ProximalRLOOConfig
    ),
    "topr": Case(_P.topr, {"baseline": 10.0}, pg_config.TOPRConfig),
    "asymre": Case(_P.asymre, {"delta": 0.1}, pg_config.AsymREConfig),
    "ppo": Case(
        _X.ppo,
        {"clip_range": 0.2, "value_clip_range": 0.2, "value_coefficient": 0.1},
        ac_config.PPOConfig,
        prepare=_X.ppo_targets,
        prepared=("advantage", "value_target", "value_old"),
        preparation={"beta": 0.3, "discount": 0.9, "gae_lambda": 0.95},
    ),
    "vineppo": Case(
        _X.vineppo,
        {"clip_range": 0.2, "kl_coefficient": 0.1},
        ac_config.VinePPOConfig,
        searcher=("rollouts_per_prefix", "step_separator"),
    ),
    "vtrace": Case(
        _A.vtrace,
        {"beta": 0.3, "discount": 0.9, "rho_bar": 1.1, "c_bar": 1.0, "value_coefficient": 0.5},
        ac_config.VTraceConfig,
    ),
    "a3c": Case(
        _A.a3c, {"beta": 0.3, "discount": 0.9, "value_coefficient": 0.5}, ac_config.A3CConfig
    ),
}


def batch(queries=3, samples=4, tokens=5, seed=0, dtype=torch.float64):
    """Ragged responses of several queries whose mean rewards differ; every input by its name.

    Ratios between policies lie in [e^-.5, e^.5]; `log_pi` and `value` carry gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (queries, samples, tokens)

    def uniform():
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, tokens + 1, shape[:2], generator=generator)
    mask = torch.arange(tokens) < lengths.unsqueeze(-1)
    log_pi = -0.5 - uniform()
    inputs = {"log_pi": log_pi}
    for name in ("log_mu", "log_old", "log_ref"):
        inputs[name] = log_pi + uniform() - 0.5
    for name in ("value", "step_advantage"):
        inputs[name] = 2 * uniform() - 1
    reward = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
    reward += 10.0 * torch.arange(queries).unsqueeze(-1)
    inputs = {name: part.where(mask, 0.0).to(dtype) for name, part in inputs.items()}
    inputs |= {"mask": mask, "reward": reward.to(dtype), "mean_reward": reward.mean().to(dtype)}
    return with_gradient(inputs) | {"max_tokens": 7}


def with_gradient(inputs):
    """Detach all and let `log_pi` and `value`, where given, carry gradient."""
    fresh = {
        name: part.detach() if isinstance(part, torch.Tensor) else part
        for name, part in inputs.items()
    }
    for name in ("log_pi", "value"):
        if name in fresh:
            fresh[name] = fresh[name].clone().requires_grad_()
    return fresh


def grad(loss, given):
    (gradient,) = torch.autograd.grad(loss, given, retain_graph=True)
    return gradient


def hand(rho=((1.5, 0.5), (0.5, 9.0)), log_mu=-1.0, reward=(3.0, 1.0)):
    """One query, two samples of two tokens and one, the ratio of each token given."""
    rho = torch.tensor([rho], dtype=torch.float64)
    anchor = torch.full_like(rho, log_mu)
    mask = torch.tensor([[[True, True], [True, False]]])
    return anchor + rho.log(), anchor, mask, torch.tensor([reward], dtype=torch.float64)
