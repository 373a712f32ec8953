"""Single-turn environments of the library verifiers: its tasks as chat prompts, its own rewards.

The policy's response is the environment's only turn: the trace that the rewards see has the prompt,
the response and nothing else. What needs more than that is refused (`verifiers_environment`).

A query's columns are `task`, the wire form of the library's task data, and `task_options`, the
options of its task set: with these the scoring process rebuilds the task without loading any data.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tba.config.load import merge
from tba.config.task import VerifiersTaskConfig
from tba.errors import ConfigError
from tba.records import Query
from tba.references import describe, user_code
from tba.tasks.base import RewardSpec, Task
from tba.tasks.prompts import make_queries
from tba.tasks.rows import Row
from tba.tasks.verifiers_environment import (
    check_environment,
    check_rewards,
    check_task,
    import_environment,
    make_config,
    messages_of,
    rebuild,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_TASKS = 1_000_000
"""Tasks that are read where no number is asked for; an environment with more must be told one."""
_START_TIMEOUT_S = 120.0  # the import alone takes 5 s on a quiet core


def load_verifiers(
    config: VerifiersTaskConfig, tokenizer: "PreTrainedTokenizerBase", *, eos_ids: Sequence[int]
) -> Task:
    """Load the environment's tasks as queries; it has no demonstrations.

    Args:
        config: The settings of the task.
        tokenizer: The policy's.
        eos_ids: The policy's tokens that end a response; others were cut off, the trace says.

    Raises:
        ConfigError: The library or the environment is missing, is of another version, refuses the
            options, has too few tasks, or needs more than one turn gives.
        UserCodeError: The environment's code raises.
    """
    train_rows, test_rows = _draw(config)
    train, test = (
        _queries(rows, config, tokenizer, f"environment {config.environment}")
        for rows in (train_rows, test_rows)
    )
    return Task(
        train=train,
        test=test,
        reward=RewardSpec(
            ("tba.tasks.verifiers_environment:Scoring",),
            (1.0,),
            config.reward_timeout_s,
            options=({"environment": config.environment, "eos_ids": tuple(eos_ids)},),
            start_timeout_s=_START_TIMEOUT_S,
            setting=f"task.environment ({config.environment})",
        ),
        pass_threshold=config.pass_threshold,
        demonstrations=None,
        skipped=len(train_rows) + len(test_rows) - len(train) - len(test),
    )


def _queries(
    rows: Sequence[Row],
    config: VerifiersTaskConfig,
    tokenizer: "PreTrainedTokenizerBase",
    name: str,
) -> list[Query]:
    # The rows' own system messages have the setting in them already.
    plain = config.model_copy(update={"system_prompt": None})
    queries, _ = make_queries(rows, plain, tokenizer, name=name)
    return [replace(q, columns={**q.columns, "prompt_tokens": len(q.prompt_ids)}) for q in queries]


def _draw(config: VerifiersTaskConfig) -> tuple[list[Row], list[Row]]:
    """Return rows to train on and held-out rows, no prompt among both, in a seeded order."""
    if config.test_options is None:
        rows = _rows(config, "task.options", config.options, besides=config.test_queries)
        if len(rows) <= config.test_queries:
            raise ConfigError(
                f"environment {config.environment} has {len(rows)} tasks, but task.test_queries is "
                f"{config.test_queries} of them: hold out fewer, or set task.test_options"
            )
        test, train = rows[: config.test_queries], rows[config.test_queries :]
    else:
        options = merge(config.options, config.test_options)
        test = _rows(config, "task.test_options", options, most=config.test_queries)
        test = test[: config.test_queries]
        train = _rows(config, "task.options", config.options)
    held_out = {repr(row["prompt"]) for row in test}
    train = [row for row in train if repr(row["prompt"]) not in held_out]
    if not test or not train:
        raise ConfigError(
            f"environment {config.environment} has {len(test)} tasks to hold out and {len(train)} "
            "with other prompts to train on: widen task.options or task.test_options"
        )
    return train[: config.train_queries], test


def _rows(
    config: VerifiersTaskConfig,
    setting: str,
    options: dict[str, Any],
    *,
    besides: int = 0,
    most: int | None = None,
) -> list[Row]:
    """Return at most so many of the environment's tasks as rows, in a seeded order."""
    name = config.environment
    vf = import_environment(name)
    own = make_config(vf, name, setting, options)
    with user_code(f"the task set of environment {name} cannot be made"):
        tasks = vf.load_taskset(own)
        is_endless = bool(tasks.INFINITE)
    check_environment(vf, name, tasks)
    if most is None and config.train_queries is not None:
        most = config.train_queries + besides
    if is_endless and most is None:
        raise ConfigError(
            f"environment {name} makes tasks without end: set task.train_queries to how many are "
            "to be trained on"
        )
    with user_code(f"the tasks of environment {name} cannot be loaded"):
        found = list(islice(tasks, most if is_endless else _MOST_TASKS + 1))
    if len(found) > _MOST_TASKS:
        raise ConfigError(f"environment {name} has more than {_MOST_TASKS} tasks: narrow {setting}")
    if found:
        check_rewards(name, found[0])
    order = np.random.default_rng(config.split_seed).permutation(len(found))
    return [_row(vf, config, found[i], options) for i in order]


def _row(vf: Any, config: VerifiersTaskConfig, task: Any, options: dict[str, Any]) -> Row:
    if config.system_prompt is not None:  # as the library's own setting of that name does
        task = task.with_data(system_prompt=config.system_prompt)
    check_task(vf, config.environment, task)
    messages = messages_of(vf, task.data)
    if not config.chat and [m["role"] for m in messages] != ["user"]:
        raise ConfigError(
            f"task.chat is false, but a prompt of environment {config.environment} has the roles "
            f"{', '.join(m['role'] for m in messages)}: set task.chat to true"
        )
    return {
        "prompt": messages if config.chat else messages[0]["content"],
        "task": _on_the_wire(config.environment, task),
        "task_options": options,
    }


def _on_the_wire(name: str, task: Any) -> dict[str, Any]:
    """Return the task's data as JSON values that give the same data again."""
    problem = "is not the same after it was written as JSON"
    try:
        sent = task.data.model_dump(mode="json")
        if bool(rebuild(type(task), sent) == task.data):
            return sent
    except (TypeError, ValueError, AttributeError) as error:
        problem = f"cannot be written as JSON and read again ({describe(error)})"
    raise ConfigError(
        f"the data of task {task.data.idx} of environment {name} {problem}, so that its reward "
        "could not be had in the scoring process: give its class fields of plain values"
    )
