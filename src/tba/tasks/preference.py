"""Preference tuning: prompts from data files, a reward model, and a gold judge that only evaluates.

Rows, hold-out and pairs are those of a custom task (`tba.tasks.custom`). The answer that a held-out
row gives, in its column `completion` or `chosen`, is one that the policy is compared with.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tba.config.search import Given
from tba.config.task import CustomTaskConfig, PreferenceTaskConfig
from tba.records import Query
from tba.tasks.answers import read_answer
from tba.tasks.base import RewardSpec, Task
from tba.tasks.comparison import Comparison
from tba.tasks.custom import held_out_source, load_custom, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START_TIMEOUT_S = 600.0
"""Longest time to load a reward model, which may come from the hub, in seconds."""
GIVEN = ("completion", "chosen")
"""Columns of a given answer; the first that a row has counts."""
_MODEL = "tba.tasks.reward_model:RewardModel"


def load_preference(
    config: PreferenceTaskConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    given: Given,
    eos_ids: Sequence[int],
) -> Task:
    """Read the rows as a custom task's, and name reward and judge.

    Args:
        config: The settings.
        tokenizer: The policy's.
        given: Which answers of the training rows are wanted.
        eos_ids: The policy's tokens that end a response.

    Raises:
        DataError: The rows cannot be used.
        UserCodeError: A reward's name means nothing.
    """
    shared = set(CustomTaskConfig.model_fields) & set(PreferenceTaskConfig.model_fields)
    rows = CustomTaskConfig(**{name: getattr(config, name) for name in shared - {"kind"}})
    task = load_custom(rows, tokenizer, given=given)
    judge = None if config.judge is None else _judge(config, config.judge)
    return dataclasses.replace(
        task,
        reward=dataclasses.replace(
            _reward(config, task.reward),
            missing_eos_penalty=config.missing_eos_penalty,
            eos_ids=tuple(eos_ids),
        ),
        pass_threshold=None,
        measures=(Comparison(judge, given_answers(task.test, held_out_source(rows))),),
        compares_with_reference=judge is not None,
    )


def given_answers(queries: Sequence[Query], source: str) -> list[str | None]:
    """Return the answer that the row of each held-out query gives; None where it gives none.

    Raises:
        DataError: A column holds something else than an answer.
    """
    found: list[str | None] = []
    for number, query in enumerate(queries, start=1):
        names = [name for name in GIVEN if query.columns.get(name) is not None]
        where = f"of row {number} of {source}"
        found.append(read_answer(query.columns[names[0]], f"{names[0]} {where}") if names else None)
    return found


def _reward(config: PreferenceTaskConfig, functions: RewardSpec) -> RewardSpec:
    """Return the reward model, or the functions where there is none."""
    if config.reward_model is None:
        return functions
    setting = f"task.reward_model ({config.reward_model})"
    spec = _model(config, config.reward_model, config.reward_label, config.reward_timeout_s)
    return dataclasses.replace(spec, setting=setting)


def _judge(config: PreferenceTaskConfig, name: str) -> RewardSpec:
    """Return the judge: a function's name has a colon, a model's has none."""
    if ":" in name:
        spec = RewardSpec((resolve(name),), (1.0,), config.judge_timeout_s)
    else:
        spec = _model(config, name, config.judge_label, config.judge_timeout_s)
    return dataclasses.replace(spec, setting=f"task.judge ({name})")


def _model(
    config: PreferenceTaskConfig, name: str, label: str | None, timeout_s: float
) -> RewardSpec:
    options: dict[str, Any] = {
        "name": name,
        "label": label,
        "template": config.scored_text,
        "chat": config.chat,
        "device": config.scoring_device,
        "dtype": config.scoring_dtype,
    }
    return RewardSpec((_MODEL,), (1.0,), timeout_s, (options,), START_TIMEOUT_S)
