"""Which policy is trained, and the supervised warm start that may come first."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tba.config.base import Section


class BuildConfig(Section):
    """A small Llama with a character tokenizer, built from random weights."""

    characters: str = "0123456789+-="
    """The tokenizer's alphabet; one token a character, besides padding and end-of-sequence."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward layers."""
    num_hidden_layers: PositiveInt = 3
    """Number of layers."""
    num_attention_heads: PositiveInt = 4
    """Number of attention heads."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; a narrow model learns sooner with about 1 /
    sqrt(hidden_size)."""
    max_position_embeddings: PositiveInt = 64
    """Longest prompt plus response, in tokens."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"model.build.hidden_size is {self.hidden_size} with num_attention_heads "
                f"{self.num_attention_heads}: make it a multiple of twice the number of heads"
            )
        return self


class LoraConfig(Section):
    """Trains and publishes a low-rank change of the linear layers (LoRA) instead of all weights."""

    rank: PositiveInt = 16
    """r: inner width of the two factors of each layer's change."""
    alpha: PositiveFloat = 32.0
    """Scales the change by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that are changed, by the last parts of their names, such as q_proj; all-linear:
    all but the output layer."""

    @model_validator(mode="after")
    def _some_layer_changes(self) -> Self:
        if not self.target_modules:
            raise ValueError(
                "model.lora.target_modules is [], so nothing would be trained: name layers, or "
                "leave it out"
            )
        return self

    @property
    def scale(self) -> float:
        """What multiplies the product of the factors."""
        return self.alpha / self.rank


class ModelConfig(Section):
    """The policy, which is also the reference it is held close to."""

    model_name_or_path: str | None = None
    """Folder or hub name of a Hugging Face causal language model. It takes the place of one that a
    recipe or file below builds, and of its warm start."""
    build: BuildConfig | None = None
    """Builds a small model from random weights instead of loading one."""
    lora: LoraConfig | None = None
    """Trains adapters alone, which needs the extra lora (package peft)."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Runs Python code that the model folder brings along."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.model_name_or_path is not None and self.build is not None:
            raise ValueError(
                "model.model_name_or_path and model.build are both set, but a policy is either "
                "loaded or built: remove one of them (--model.model_name_or_path none sets the "
                "recipe's aside)"
            )
        return self


class WarmStartConfig(Section):
    """Supervised fine-tuning on the task's demonstrations; its result is the reference."""

    steps: NonNegativeInt = 0
    """Optimiser steps; 0 leaves the policy as it is."""
    stop_at_loss: float = Field(default=0.0, ge=0)
    """Ends earlier, once the mean loss of the last ten steps (nats per token) is at most this; 0:
    never."""
    batch_size: PositiveInt = 256
    """Demonstrations a step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW; it falls to zero along a cosine."""
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    """AdamW decay rate of the second moment; a run of a few hundred steps needs a short memory."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
