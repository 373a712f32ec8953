r"""Word problems and mathematics from files: GSM8K (`#### number`) and MATH (`\boxed{...}`)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tba.config.task import Gsm8kTaskConfig, MathTaskConfig
from tba.errors import DataError
from tba.records import Query
from tba.tasks.base import RewardSpec, Task
from tba.tasks.final_answer import MAX_ANSWER, find_box, find_marked_answer
from tba.tasks.prompts import fill, make_queries
from tba.tasks.rewards import BUILT_IN, find_final_answer
from tba.tasks.rows import Row, read_rows, require_columns
from tba.tasks.templates import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALCULATOR = re.compile(r"<<.*?>>")


def load_gsm8k(config: Gsm8kTaskConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Read both files; a demonstration is the solution without its calculator notes `<<48/2=24>>`.

    Raises:
        ConfigError: The prompt template has no place for the question, or another placeholder.
        DataError: A file or a row of it cannot be used.
    """
    rows, test_rows = (_gsm8k_rows(path) for path in (config.train_file, config.test_file))
    return _task(config, tokenizer, (rows, test_rows), "question", _gsm8k_solution)


def load_math(config: MathTaskConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Read both files; a demonstration is a row's `completion`, `solution` or answer in a box.

    The `answer` column that the reward gets is the final answer, whatever the rows give.

    Raises:
        ConfigError: The prompt template has no place for the problem, or another placeholder.
        DataError: A file or a row of it cannot be used.
    """
    rows, test_rows = (_math_rows(path) for path in (config.train_file, config.test_file))
    return _task(config, tokenizer, (rows, test_rows), "problem", _math_solution)


def _gsm8k_solution(query: Query) -> str:
    return _CALCULATOR.sub("", query.columns["answer"])


def _math_solution(query: Query) -> str:
    row = query.columns
    return str(row.get("completion") or row.get("solution") or f"\\boxed{{{row['answer']}}}")


def _task(
    config: Gsm8kTaskConfig | MathTaskConfig,
    tokenizer: "PreTrainedTokenizerBase",
    splits: tuple[list[Row], list[Row]],
    column: str,
    solution: Callable[[Query], str],
) -> Task:
    template = template_text(config.prompt_template, "task.prompt_template", column)
    rows, test_rows = (
        [
            row | {"prompt": fill(template, "task.prompt_template", {column: row[column]})}
            for row in split
        ]
        for split in splits
    )
    train, kept = make_queries(rows, config, tokenizer, name=str(config.train_file))
    test, kept_test = make_queries(test_rows, config, tokenizer, name=str(config.test_file))
    return Task(
        train=train,
        test=test,
        reward=RewardSpec((BUILT_IN[config.kind],), (1.0,), config.reward_timeout_s),
        pass_threshold=config.pass_threshold,
        demonstrations=[solution(query) for query in train],
        test_demonstrations=[solution(query) for query in test],
        skipped=len(rows) + len(test_rows) - len(kept) - len(kept_test),
    )


def _gsm8k_rows(path: Path) -> list[Row]:
    rows = read_rows(path)
    require_columns(rows, ("question", "answer"), str(path))
    for number, row in enumerate(rows, start=1):
        if "####" not in str(row["answer"]) or find_final_answer(str(row["answer"])) is None:
            raise DataError(f"answer of row {number} of {path} does not end in '#### number'")
    return rows


def _math_rows(path: Path) -> list[Row]:
    """Return the rows with `problem` and the final `answer`, whatever their columns are called."""
    rows = [
        row | {"problem": row["question"]} if row.get("question") and "problem" not in row else row
        for row in read_rows(path)
    ]
    require_columns(rows, ("problem",), str(path))
    return [
        row | {"answer": _gold(row, f"row {number} of {path}")}
        for number, row in enumerate(rows, start=1)
    ]


def _gold(row: Row, where: str) -> str:
    """Return the final answer of a row: its `answer`, or what its `solution` boxes last."""
    given = row.get("answer")
    if given is None or not str(given).strip():
        solution = row.get("solution")
        if solution is None:
            raise DataError(
                f"{where} has neither column 'answer' nor 'solution': give the answer, or a "
                "solution that ends in \\boxed{answer}"
            )
        answer = find_box(str(solution))
    else:
        text = str(given).strip()
        # Such an answer column holds a whole solution, as GSM8K's does.
        answer = find_marked_answer(text) if re.search(r"####|\\boxed", text) else text
    if answer is None or len(answer) > MAX_ANSWER:
        raise DataError(
            f"{where} has no final answer of at most {MAX_ANSWER} characters: write it into column "
            "'answer', or into the last \\boxed{answer} of 'solution'"
        )
    return answer
