"""Supervised fine-tuning on demonstrations before the run; its result is the reference."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
import torch

from tba.config.model import WarmStartConfig
from tba.config.training import CosineRate
from tba.policy.loading import Policy
from tba.policy.log_probs import full_row_log_probs
from tba.records import Int32
from tba.schedules import learning_rate_at

_MAX_GRAD_NORM = 1.0
_STEPS_IN_MEAN = 10
"""Losses averaged before they are compared with `stop_at_loss`."""
_WARMUP_SHARE = 10
"""One step in so many belongs to the linear warm-up."""


def warm_start(
    policy: Policy, rows: Sequence[tuple[Int32, str]], config: WarmStartConfig, seed: int
) -> float:
    """Train the policy in place on (prompt tokens, demonstration) pairs; return the last loss.

    The loss is the cross-entropy of the demonstration tokens and the end-of-sequence token, each
    with the same weight, as a mean over the last ten steps. The order of the rows depends on the
    seed alone.
    """
    prompts = [prompt for prompt, _ in rows]
    texts = policy.tokenizer([text for _, text in rows], add_special_tokens=False)["input_ids"]
    answers = [np.array([*text, policy.eos_ids[0]], dtype=np.int32) for text in texts]
    optimiser = torch.optim.AdamW(
        policy.model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    schedule = CosineRate(warmup_steps=config.steps // _WARMUP_SHARE)
    losses: deque[float] = deque(maxlen=_STEPS_IN_MEAN)
    batches = _batches(len(rows), config.batch_size, torch.Generator().manual_seed(seed))
    for step, batch in zip(range(config.steps), batches, strict=False):
        rate = config.learning_rate * learning_rate_at(schedule, step, config.steps)
        optimiser.param_groups[0]["lr"] = rate
        log_probs = full_row_log_probs(
            policy.model, [prompts[i] for i in batch], [answers[i] for i in batch]
        )
        mean_loss = -log_probs.mean()
        optimiser.zero_grad()
        mean_loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), _MAX_GRAD_NORM)
        optimiser.step()
        losses.append(mean_loss.item())
        if len(losses) == _STEPS_IN_MEAN and fmean(losses) <= config.stop_at_loss:
            break
    return fmean(losses) if losses else math.nan


def _batches(rows: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield batches without end, each row once a round; the last of a round may be short."""
    while True:
        for batch in torch.randperm(rows, generator=generator).split(size):
            yield batch.tolist()
