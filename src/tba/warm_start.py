"""Supervised fine-tuning on demonstrations before the run; its result is the reference.

The steps are the trainer's own (`tba.update`) with objective `sft`: its micro-batches, precision
and clipping, but the batch size and the learning rate of the section `warm_start`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import numpy as np
import torch

from tba.config import Config, TrainerConfig
from tba.config.objectives import SftConfig
from tba.config.training import CosineRate
from tba.errors import DivergedError
from tba.given import tokenize_answers
from tba.policy.loading import Policy
from tba.records import Batch, Int32
from tba.update import PolicyUpdate

_MAX_GRAD_NORM = 1.0
_STEPS_IN_MEAN = 10
"""Losses averaged before they are compared with `stop_at_loss`."""
_STEPS_TOLD = 20
_WARMUP_SHARE = 10
"""One step in so many belongs to the linear warm-up."""


def warm_start(policy: Policy, rows: Sequence[tuple[Int32, str]], config: Config) -> float:
    """Train the policy in place on (prompt tokens, demonstration) pairs; return the last loss.

    An end-of-sequence token follows each demonstration; the rest is as in `fine_tune`.
    """
    answers = [answer.tokens for answer in tokenize_answers([text for _, text in rows], policy)]
    return fine_tune(policy, [prompt for prompt, _ in rows], answers, config)


def fine_tune(
    policy: Policy,
    prompts: Sequence[Int32],
    answers: Sequence[Int32],
    config: Config,
    tell: Callable[[str], None] = lambda text: None,
) -> float:
    """Train the policy in place on answers to prompts, as tokens; return the last loss.

    `tell` is told of twenty steps at even distances.

    The settings are those of the section `warm_start`. The loss is the cross-entropy of the
    answers' tokens, each with the same weight, as a mean over the last ten steps. The order of the
    rows depends on the seed alone.

    Raises:
        DivergedError: The loss is not finite in the end.
    """
    settings = config.warm_start
    if settings.steps == 0:
        return math.nan
    update = PolicyUpdate(policy.model, _supervised(config), policy.eos_ids)
    losses: deque[float] = deque(maxlen=_STEPS_IN_MEAN)
    generator = torch.Generator().manual_seed(config.seed)
    draws = _batches(len(answers), settings.batch_size, generator)
    for step, chosen in zip(range(settings.steps), draws, strict=False):
        batch = supervised_batch([prompts[i] for i in chosen], [answers[i] for i in chosen])
        losses.append(update.step(batch, step).metrics["loss"])
        if (step + 1) % max(1, settings.steps // _STEPS_TOLD) == 0:
            tell(f"step {step + 1} of {settings.steps}, loss {fmean(losses):.4f} nats a token")
        if len(losses) == _STEPS_IN_MEAN and fmean(losses) <= settings.stop_at_loss:
            break
    if not math.isfinite(fmean(losses)):
        raise DivergedError(
            f"the cross-entropy is {fmean(losses)} after {step + 1} steps: lower the learning "
            "rate, or look for broken weights in the model"
        )
    update.optimizer.zero_grad()  # a gradient's memory is as much as the weights'
    return fmean(losses)


def _supervised(config: Config) -> Config:
    """Return the settings under which the trainer's step is a supervised one."""
    own = config.warm_start
    trainer = TrainerConfig(
        steps=own.steps,
        queries_per_batch=own.batch_size,
        samples_per_query=1,
        learning_rate=own.learning_rate,
        learning_rate_schedule=CosineRate(warmup_steps=own.steps // _WARMUP_SHARE),
        adam_beta2=own.adam_beta2,
        weight_decay=own.weight_decay,
        max_grad_norm=_MAX_GRAD_NORM,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        precision=config.trainer.precision,
    )
    search = config.search.model_copy(update={"temperature": 1.0})
    changes = {"trainer": trainer, "search": search, "objective": SftConfig()}
    return config.model_copy(update=changes)


def supervised_batch(prompts: Sequence[Int32], answers: Sequence[Int32]) -> Batch:
    """Return one demonstration of each query; of what `sft` does not ask for, zeros."""
    count = len(prompts)
    unknown = tuple(np.zeros(len(tokens), dtype=np.float32) for tokens in answers)
    versions = np.zeros(count, dtype=np.int64)
    numbers = np.arange(count)
    return Batch(
        prompts=tuple(prompts),
        tokens=tuple(answers),
        log_mu=unknown,
        log_ref=unknown,
        reward=np.ones(count, dtype=np.float32),
        policy_version=versions,
        reference_version=versions,
        finished=np.ones(count, dtype=np.bool_),
        slots=numbers,
        query_of_row=numbers,
        index=numbers[:, None],
        on_policy=np.zeros(count, dtype=np.bool_),
    )


def _batches(rows: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield batches without end, each row once a round; the last of a round may be short."""
    while True:
        for batch in torch.randperm(rows, generator=generator).split(size):
            yield batch.tolist()
