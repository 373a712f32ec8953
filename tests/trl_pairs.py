"""TRL's own loss of given pairs, on given log-probabilities."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch


def trl_loss_of_pairs(loss_type, log_pi, log_ref, mask, beta):
    """Call TRL's own method with a model that returns the given log-probabilities.

    Samples are [query, 2, token], the first one chosen; TRL stacks chosen and rejected.
    """
    trainer = pytest.importorskip(
        "trl.trainer.dpo_trainer", reason="trl and datasets are needed to compare with TRL"
    ).DPOTrainer
    stacked_pi, stacked_ref, stacked_mask = (
        torch.cat([part[:, 0], part[:, 1]]) for part in (log_pi, log_ref, mask)
    )
    prompt = torch.zeros_like(stacked_mask[:, :1])  # one prompt token before the response
    inputs = {
        "input_ids": torch.zeros_like(torch.cat([prompt, stacked_mask], 1)).long(),
        "attention_mask": torch.cat([~prompt, stacked_mask], 1).long(),
        "completion_mask": torch.cat([prompt, stacked_mask], 1).long(),
    }
    outputs = SimpleNamespace(
        log_probs=torch.where(stacked_mask, stacked_pi, 0.0),
        entropy=torch.zeros_like(stacked_pi),
        mean_logits=torch.zeros_like(stacked_pi),
        is_top1=stacked_mask,
    )
    reference = torch.where(stacked_mask, stacked_ref, 0.0).sum(-1).chunk(2)
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference
    fake = MagicMock(
        beta=beta,
        ld_alpha=None,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
    )
    for gather in ("gather", "gather_for_metrics"):
        setattr(fake.accelerator, gather, lambda x: x)
    return trainer._compute_loss(fake, lambda **_: outputs, inputs, False)
