"""Tasks: what is asked, and how a response is rewarded. Importing this package imports no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tba.config import Config
from tba.config.search import Given
from tba.config.task import (
    ArithmeticTaskConfig,
    CustomTaskConfig,
    Gsm8kTaskConfig,
    GymTaskConfig,
    MathTaskConfig,
    PreferenceTaskConfig,
    RedteamTaskConfig,
    TaskConfig,
    VerifiersTaskConfig,
)
from tba.tasks.arithmetic import load_arithmetic
from tba.tasks.base import RewardSpec, Task
from tba.tasks.custom import load_custom
from tba.tasks.gym import load_gym
from tba.tasks.math import load_gsm8k, load_math
from tba.tasks.preference import load_preference
from tba.tasks.redteam import load_redteam
from tba.tasks.scoring import Scorer
from tba.tasks.verifiers import load_verifiers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tba.policy.loading import Policy

__all__ = ["RewardSpec", "Scorer", "Task", "load_task", "task_of"]


def task_of(config: Config, policy: "Policy", *, given: Given = "nothing") -> Task:
    """Load the task of a run for its policy, with all that search and buffer want of it.

    Raises:
        UserError: As `load_task`.
    """
    return load_task(
        config.task,
        policy.tokenizer,
        given=given,
        eos_ids=policy.eos_ids,
        embeddings=config.buffer.needs_embeddings,
        device=str(policy.model.device),
    )


def load_task(
    config: TaskConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    given: Given = "nothing",
    eos_ids: Sequence[int] = (),
    embeddings: bool = False,
    device: str = "auto",
) -> Task:
    """Load the task that the configuration describes, tokenized for one policy.

    Args:
        config: The settings of the task.
        tokenizer: The policy's.
        given: Which answers are wanted of the rows of a task from data; others have theirs anyway.
        eos_ids: The policy's tokens that end a response; by default the tokenizer's own.
        embeddings: Whether sentence embeddings of attacks are wanted with their rewards.
        device: The policy's: models that score its responses go there, where the task names none.

    Raises:
        UserError: Data, templates, tokenizer or rewards cannot be used; the message says why.
    """
    config = _scoring_at(config, device)
    match config:
        case ArithmeticTaskConfig():
            task = load_arithmetic(config, tokenizer)
        case Gsm8kTaskConfig():
            task = load_gsm8k(config, tokenizer)
        case MathTaskConfig():
            task = load_math(config, tokenizer)
        case GymTaskConfig():
            task = load_gym(config, tokenizer)
        case VerifiersTaskConfig():
            task = load_verifiers(config, tokenizer, eos_ids=_ends(tokenizer, eos_ids))
        case CustomTaskConfig():
            task = load_custom(config, tokenizer, given=given)
        case PreferenceTaskConfig():
            ends = _ends(tokenizer, eos_ids)
            task = load_preference(config, tokenizer, given=given, eos_ids=ends)
        case RedteamTaskConfig():
            task = load_redteam(config, tokenizer, given=given, embeddings=embeddings)
    return task


def _ends(tokenizer: "PreTrainedTokenizerBase", eos_ids: Sequence[int]) -> Sequence[int]:
    own = tokenizer.eos_token_id
    return eos_ids or ([] if own is None else [own])


def _scoring_at(config: TaskConfig, device: str) -> TaskConfig:
    """Return the settings with the device of scoring models where they name none."""
    if not isinstance(config, PreferenceTaskConfig | RedteamTaskConfig):
        return config
    if config.scoring_device != "auto":
        return config
    return config.model_copy(update={"scoring_device": device})
