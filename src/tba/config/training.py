"""The trainer: optimiser, schedule, precision."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tba.config.base import Section


class ConstantRate(Section):
    """Linear warm-up, then constant."""

    kind: Literal["constant"] = "constant"
    """Schedule kind."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""


class LinearRate(Section):
    """Linear warm-up, then linear to zero at the last step."""

    kind: Literal["linear"] = "linear"
    """Schedule kind."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""


class CosineRate(Section):
    """Linear warm-up, then half a cosine down to `final_share` of the peak."""

    kind: Literal["cosine"] = "cosine"
    """Schedule kind."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate at the last step."""


class WarmupStableDecayRate(Section):
    """Linear warm-up, a constant stretch, then linear to zero at the last step (WSD)."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Schedule kind."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear warm-up."""
    decay_steps: NonNegativeInt = 500
    """Steps of the final decay, cut to what warm-up leaves; what lies between is constant."""


RateConfig = Annotated[
    ConstantRate | LinearRate | CosineRate | WarmupStableDecayRate, Field(discriminator="kind")
]


class TrainerConfig(Section):
    """The trainer's box of the algorithm."""

    steps: PositiveInt = 1_000
    """N: optimiser steps."""
    queries_per_batch: PositiveInt = 8
    """B: queries a step."""
    samples_per_query: PositiveInt = 20
    """K: samples of each query in the loss; 1 with objective.kind sft alone, since others compare
    the samples of a query."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    head_learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of what is learned beside the policy: value head, log Z."""
    anchor_every: PositiveInt = 4
    """Steps after which the anchor pi_old becomes the policy, for objectives that have one."""
    learning_rate_schedule: RateConfig = ConstantRate()
    """Learning rate over the run, relative to its peak."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW decay rate of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW decay rate of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: PositiveInt = 16_384
    """Most tokens (prompts once, responses less their last tokens) in one forward and backward
    pass; whole queries only."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; bfloat16 is autocast over float32 weights and optimiser. auto:
    bfloat16 where the device has it and, on a CPU, the model is large enough to gain by it."""
    max_bad_steps: PositiveInt = 5
    """The run stops after this many steps in a row without a finite loss and gradient; each is
    skipped."""
