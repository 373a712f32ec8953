"""Batches and settings on which the whole squared family is tested."""

import torch

from objectives.tree import call
from tba.objectives.base import declared
from tba.objectives.f_trajectory_balance import f_tb
from tba.objectives.learned_z import dro, flowrl, tb_learned_z
from tba.objectives.mirror_descent import a_star_po, gvpo, kimi, opmd
from tba.objectives.subtrajectory_balance import subtb
from tba.objectives.tapered_trajectory_balance import tb_tapered
from tba.objectives.trajectory_balance import trajectory_balance
from tba.objectives.trajectory_balance_prime import tb_prime

BETA = 0.3
KINDS = {
    "tb": (trajectory_balance, {"beta": BETA}),
    "tb_prime": (tb_prime, {"beta": BETA, "ratio_cap": 1.2, "kl_clamp": 0.4}),
    "tb_prime without limits": (tb_prime, {"beta": BETA, "ratio_cap": None, "kl_clamp": None}),
    "tb_tapered": (tb_tapered, {"beta": BETA}),
    "tb_learned_z": (tb_learned_z, {"beta": BETA}),
    "dro": (dro, {"beta": BETA}),
    "flowrl": (flowrl, {"beta": BETA, "std_epsilon": 1e-6}),
    "kimi": (kimi, {"tau": BETA}),
    "gvpo": (gvpo, {"beta": BETA}),
    "opmd": (opmd, {"tau": BETA}),
    "a_star_po": (a_star_po, {"beta": BETA}),
    "f_tb huber": (f_tb, {"beta": BETA, "phi": "huber", "scale": 3.0}),
    "f_tb linex": (f_tb, {"beta": BETA, "phi": "linex", "scale": 3.0}),
    "f_tb linex mirrored": (f_tb, {"beta": BETA, "phi": "linex", "scale": -3.0}),
    "subtb": (subtb, {"beta": BETA, "subtb_lambda": 1.0}),
    "subtb short": (subtb, {"beta": BETA, "subtb_lambda": 0.5}),
}
LEARNED = ("log_pi", "log_stop", "log_z")
"""The inputs through which gradient flows."""


def batch(queries=3, samples=4, tokens=5, seed=0):
    """Ragged responses of several queries whose mean rewards differ, by input name."""
    generator = torch.Generator().manual_seed(seed)
    shape = (queries, samples, tokens)
    lengths = torch.randint(1, tokens + 1, shape[:2], generator=generator)
    mask = torch.arange(tokens) < lengths.unsqueeze(-1)

    def normal(size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    offset = 10.0 * torch.arange(queries, dtype=torch.float64)
    names = ("log_pi", "log_stop", "log_ref", "log_ref_stop", "log_mu")
    inputs = {name: -normal(shape).abs().where(mask, 0.0) for name in names}
    inputs |= {
        "mask": mask,
        "finished": (lengths < tokens) | (normal(shape[:2]) > 0),
        "reward": normal(shape[:2]) + offset[:, None],
        "prefix_reward": (normal(shape) + offset[:, None, None]).where(mask, 0.0),
        "log_z": normal(queries) + offset / BETA,
        "log_z_star": normal(shape[:2]) + offset[:, None] / BETA,
    }
    return learning(inputs)


def learning(inputs):
    """The inputs anew, with gradient where it belongs."""
    return {
        name: value.detach().clone().requires_grad_(name in LEARNED)
        for name, value in inputs.items()
    }


def value_and_gradients(kind, inputs):
    """Loss, metrics and the gradient of each learned input that the kind names."""
    objective, settings = KINDS[kind]
    output = call(objective, inputs, **settings)
    names = [name for name in declared(objective)[0] if name in LEARNED]
    found = torch.autograd.grad(output.loss, [inputs[name] for name in names])
    return output, dict(zip(names, found, strict=True))
