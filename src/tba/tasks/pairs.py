"""Pairs of answers in a task's rows, in TRL's form: the columns `chosen` and `rejected`.

Either is a text, or a list of messages of which the last one alone is the assistant's: its content
is the answer, and what precedes it repeats the prompt.
"""

from collections.abc import Sequence
from typing import Any

from tba.errors import DataError
from tba.tasks.base import Pair
from tba.tasks.prompts import is_unicode
from tba.tasks.rows import Row, require_columns

COLUMNS = ("chosen", "rejected")


def read_pairs(rows: Sequence[Row], source: str) -> list[Pair]:
    """Return the pair of each row.

    Raises:
        DataError: Naming the first row without one, its column and what it holds.
    """
    require_columns(rows, COLUMNS, source)
    return [
        Pair(*(_answer(row[name], f"{name} of row {number} of {source}") for name in COLUMNS))
        for number, row in enumerate(rows, start=1)
    ]


def _answer(value: Any, where: str) -> str:
    answer = value
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        roles = [message.get("role") for message in value]
        if roles.count("assistant") == 1 and roles[-1] == "assistant":
            answer = value[-1].get("content")
    if not isinstance(answer, str) or not is_unicode(answer):
        raise DataError(
            f"{where} is {value!r:.80}, expected a text or a list of messages of which the last "
            "one alone is the assistant's"
        )
    return answer
