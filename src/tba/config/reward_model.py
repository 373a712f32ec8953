"""How a reward model is trained: `tba reward-model`. Its options are these settings."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tba.config.base import Section


class RewardModelConfig(Section):
    """Bradley-Terry training on pairs of completions."""

    model: str
    """Folder or hub name of the language model to start from, such as the SFT model."""
    test_file: Path | None = None
    """Held-out rows in the same form; without it, `test_share` of the data is held out."""
    test_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the data held out when there is no `test_file`."""
    chat: bool = False
    """Reads prompts that are texts as users' messages, through the model's chat template."""
    max_length: int | None = Field(default=None, gt=1)
    """Most tokens of prompt and completion, whose beginning is cut off; by default what model and
    tokenizer take."""
    epochs: PositiveInt = 1
    """Times that each pair is seen."""
    batch_size: PositiveInt = 64
    """Pairs a step."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW; it rises over a tenth of the steps and falls to zero along a
    cosine."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass, as `trainer.precision`; weights are float32."""
    seed: NonNegativeInt = 0
    """Seed of the new head and of the order of pairs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU when there is one."""
