"""GSM8K: word problems whose solutions end in `#### number`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tba.config.task import Gsm8kTaskConfig
from tba.errors import DataError
from tba.records import Query
from tba.tasks.base import RewardSpec, Task
from tba.tasks.prompts import fill, make_queries
from tba.tasks.rewards import BUILT_IN, find_final_answer
from tba.tasks.rows import Row, read_rows, require_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALCULATOR = re.compile(r"<<.*?>>")


def load_gsm8k(config: Gsm8kTaskConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Read both files; a demonstration is the solution without its calculator notes `<<48/2=24>>`.

    Raises:
        DataError: A file or a row of it cannot be used.
    """
    rows, test_rows = (
        _read(path, config.prompt_template) for path in (config.train_file, config.test_file)
    )
    train, kept = make_queries(rows, config, tokenizer, name=str(config.train_file))
    test, kept_test = make_queries(test_rows, config, tokenizer, name=str(config.test_file))
    return Task(
        train=train,
        test=test,
        reward=RewardSpec((BUILT_IN["gsm8k"],), (1.0,), config.reward_timeout_s),
        pass_threshold=config.pass_threshold,
        demonstrations=[_demonstration(query) for query in train],
        test_demonstrations=[_demonstration(query) for query in test],
        skipped=len(rows) + len(test_rows) - len(kept) - len(kept_test),
    )


def _demonstration(query: Query) -> str:
    return _CALCULATOR.sub("", query.columns["answer"])


def _read(path: Path, template: str) -> list[Row]:
    rows = read_rows(path)
    require_columns(rows, ("question", "answer"), str(path))
    for number, row in enumerate(rows, start=1):
        if "####" not in str(row["answer"]) or find_final_answer(str(row["answer"])) is None:
            raise DataError(f"answer of row {number} of {path} does not end in '#### number'")
    return [
        row | {"prompt": fill(template, "task.prompt_template", {"question": row["question"]})}
        for row in rows
    ]
