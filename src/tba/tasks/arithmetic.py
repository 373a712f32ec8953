"""Arithmetic with an exact-answer reward: needs no data and has a known right answer."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tba.config.task import ArithmeticTaskConfig
from tba.records import Int64, Query
from tba.tasks.base import RewardSpec, Task
from tba.tasks.prompts import fill, make_queries
from tba.tasks.rewards import BUILT_IN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def load_arithmetic(config: ArithmeticTaskConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Draw distinct questions and split them; `12+34` and `34+12` are two questions.

    The reward is `tba.tasks.rewards.arithmetic`; a demonstration is the answer alone.
    """
    questions = _draw(config, config.train_queries + config.test_queries)
    rows = [_row(config, number) for number in questions.tolist()]
    train, kept = _queries(
        rows[: config.train_queries], config, tokenizer, "the training questions"
    )
    test, kept_test = _queries(
        rows[config.train_queries :], config, tokenizer, "the held-out questions"
    )
    return Task(
        train=train,
        test=test,
        reward=RewardSpec((BUILT_IN["arithmetic"],), (1.0,), config.reward_timeout_s),
        pass_threshold=config.pass_threshold,
        demonstrations=[query.columns["answer"] for query in train],
        test_demonstrations=[query.columns["answer"] for query in test],
        skipped=len(rows) - len(kept) - len(kept_test),
    )


def _draw(config: ArithmeticTaskConfig, count: int) -> Int64:
    """Return `count` distinct question numbers in random order, without listing them all."""
    space = len(config.operators) * _width(config.left) * _width(config.right)
    return np.random.default_rng(config.split_seed).choice(space, size=count, replace=False)


def _row(config: ArithmeticTaskConfig, number: int) -> dict[str, Any]:
    """Return the question of that number: the operator varies fastest, then b, then a."""
    number, which = divmod(number, len(config.operators))
    a, b = divmod(number, _width(config.right))
    a, b, op = a + config.left[0], b + config.right[0], config.operators[which]
    question = {"a": a, "op": op, "b": b}
    prompt = fill(config.prompt_template, "task.prompt_template", question)
    return question | {"answer": str(RESULT[op](a, b)), "prompt": prompt}


def _queries(
    rows: list[dict[str, Any]],
    config: ArithmeticTaskConfig,
    tokenizer: "PreTrainedTokenizerBase",
    name: str,
) -> tuple[list[Query], list[int]]:
    placeholders = [{k: row[k] for k in ("a", "op", "b")} for row in rows]
    prefixes = [fill(config.answer_prefix, "task.answer_prefix", p) for p in placeholders]
    return make_queries(rows, config, tokenizer, name=name, prefixes=prefixes)


def _width(limits: tuple[int, int]) -> int:
    return limits[1] - limits[0] + 1
