"""Losses and gradients of TRL's own loss methods, called on given log-probabilities."""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ratio_objectives import batch, grad
from tba.objectives.group_relative import dr_grpo, grpo, gspo
from tba.objectives.importance import cispo
from tba.objectives.policy_gradient import penalised_reward, rloo_proximal

REASON = "trl and what it imports (datasets, pandas) are not installed"
EPSILON = 0.2


def _trainer(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        return getattr(pytest.importorskip(f"trl.trainer.{module}", reason=REASON), name)


def _stub(log_pi, mask, **settings):
    """What the loss methods read of a trainer whose model gives these log-probabilities."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    defaults = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            log_pi,
            torch.zeros_like(log_pi),
            None,
        ),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": EPSILON,
        "epsilon_high": EPSILON,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 7,
        "_entropy_bonus_enabled": False,
        "accelerator": accelerator,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(**defaults | settings)


def _flat(part):
    return part.flatten(0, 1)  # [query, sample, ...] to [query * sample, ...]


def _trl_loss(trainer, inputs, advantage, **settings):
    mask = inputs["mask"]
    tokens = torch.zeros(12, 5, dtype=torch.long)
    given = {
        "prompt_ids": tokens,
        "prompt_mask": tokens,
        "completion_ids": tokens,
        "completion_mask": _flat(mask).long(),
        "advantages": _flat(advantage),
        "old_per_token_logps": _flat(inputs["log_mu"]),
        "old_logps": _flat(inputs["log_mu"]).sum(-1),
        "ref_per_token_logps": _flat(inputs["log_ref"]),
        "num_items_in_batch": mask.sum(),
    }
    stub = _stub(_flat(inputs["log_pi"]), mask, **settings)
    loss = trainer._compute_loss(stub, None, given)
    return loss, stub._metrics["train"]


def _agree(ours, theirs, log_pi):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad(ours, log_pi), grad(theirs, log_pi), rtol=1e-5, atol=1e-7)


def _named(inputs, *names):
    return [inputs[name] for name in names]


@pytest.fixture
def inputs():
    return batch()


@pytest.fixture
def scaled(inputs):
    """A / (std + eps) with TRL's own standard deviation."""
    _trainer("utils", "nanstd")
    from trl.trainer.utils import nanstd

    reward = inputs["reward"]
    return (reward - reward.mean(1, keepdim=True)) / (nanstd(reward, dim=1, keepdim=True) + 1e-4)


def test_grpo_is_trl_s(inputs, scaled):
    trainer = _trainer("grpo_trainer", "GRPOTrainer")
    theirs, metrics = _trl_loss(trainer, inputs, scaled, loss_type="grpo", beta=0.04)
    names = ("log_pi", "log_mu", "log_ref", "mask", "reward")
    ours = grpo(*_named(inputs, *names), beta=0.04, clip_range=EPSILON, std_epsilon=1e-4)
    _agree(ours.loss, theirs, inputs["log_pi"])
    assert metrics["clip_ratio/region_mean"][0] > 0


def test_dr_grpo_is_trl_s(inputs):
    trainer = _trainer("grpo_trainer", "GRPOTrainer")
    centred = inputs["reward"] - inputs["reward"].mean(1, keepdim=True)
    theirs, _ = _trl_loss(trainer, inputs, centred, loss_type="dr_grpo")
    ours = dr_grpo(*_named(inputs, "log_pi", "log_mu", "mask", "reward"), 7, clip_range=EPSILON)
    _agree(ours.loss, theirs, inputs["log_pi"])


def test_gspo_is_trl_s_grpo_at_sequence_level(inputs, scaled):
    trainer = _trainer("grpo_trainer", "GRPOTrainer")
    settings = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06}
    theirs, metrics = _trl_loss(trainer, inputs, scaled, loss_type="grpo", **settings)
    ours = gspo(
        *_named(inputs, "log_pi", "log_mu", "mask", "reward"),
        clip_low=0.05,
        clip_high=0.06,
        std_epsilon=1e-4,
    )
    _agree(ours.loss, theirs, inputs["log_pi"])
    share = metrics["clip_ratio/region_mean"][0]
    assert ours.metrics["clipped_share"].item() == pytest.approx(share, rel=1e-5)


def test_cispo_is_trl_s_query_by_query():
    # TRL's mean is over the tokens of the batch, ours over those of each query: the same for one.
    trainer = _trainer("grpo_trainer", "GRPOTrainer")
    one = batch(queries=1, samples=12)
    centred = one["reward"] - one["reward"].mean(1, keepdim=True)
    theirs, _ = _trl_loss(trainer, one, centred, loss_type="cispo", epsilon_high=1.2)
    ours = cispo(*_named(one, "log_pi", "log_mu", "mask", "reward"), ratio_cap=1.2)
    _agree(ours.loss, theirs, one["log_pi"])


def test_proximal_rloo_is_trl_s_rloo(inputs):
    # TRL's RLOO trainer clips the ratio of the response; its advantage, written out as there.
    trainer = _trainer("rloo_trainer", "RLOOTrainer")
    arguments = _named(inputs, "log_pi", "log_mu", "log_ref", "mask", "reward")
    total = penalised_reward(*arguments[1:], 0.05)
    baseline = (total.nansum(1, keepdim=True) - total) / 3
    theirs, metrics = _trl_loss(trainer, inputs, total - baseline)
    ours = rloo_proximal(*arguments, beta=0.05, clip_range=EPSILON)
    _agree(ours.loss, theirs, inputs["log_pi"])
    share = metrics["clip_ratio/region_mean"][0]
    assert ours.metrics["clipped_share"].item() == pytest.approx(share, rel=1e-5)
