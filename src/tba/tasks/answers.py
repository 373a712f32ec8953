"""Answers in a task's rows, in TRL's form: pairs and demonstrations.

    pairs            the columns `chosen` and `rejected`
    demonstrations   the column `completion`, or `response`

Each is a text, or a list of messages of which the last one alone is the assistant's: its content is
the answer, and what precedes it repeats the prompt.
"""

from collections.abc import Sequence
from typing import Any

from tba.errors import DataError
from tba.tasks.base import Pair
from tba.tasks.prompts import is_unicode
from tba.tasks.rows import Row, require_columns

PAIR = ("chosen", "rejected")
DEMONSTRATION = ("completion", "response")
"""Names of the column, the first of which a row has counts."""


def read_pairs(rows: Sequence[Row], source: str) -> list[Pair]:
    """Return the pair of each row.

    Raises:
        DataError: Naming the first row without one, its column and what it holds.
    """
    require_columns(rows, PAIR, source)
    return [
        Pair(*(read_answer(row[name], f"{name} of row {number} of {source}") for name in PAIR))
        for number, row in enumerate(rows, start=1)
    ]


def read_demonstrations(rows: Sequence[Row], source: str) -> list[str]:
    """Return the demonstration of each row.

    Raises:
        DataError: Naming the first row without one, its column and what it holds.
    """
    found = read_some_demonstrations(rows, source)
    for number, (row, text) in enumerate(zip(rows, found, strict=True), start=1):
        if text is None:
            raise DataError(
                f"row {number} of {source} has no demonstration: it needs a column completion (or "
                "messages that end with the assistant's), but has "
                f"{', '.join(name for name in row if row[name] is not None) or 'none'}"
            )
    return [text for text in found if text is not None]


def read_some_demonstrations(rows: Sequence[Row], source: str) -> list[str | None]:
    """Return the demonstration of each row that has one, None for the others.

    Raises:
        DataError: Naming the first row whose column holds no answer, and what it holds.
    """
    return [
        _demonstration(row, f"row {number} of {source}") for number, row in enumerate(rows, start=1)
    ]


def _demonstration(row: Row, where: str) -> str | None:
    for name in DEMONSTRATION:
        if row.get(name) is not None:
            text = read_answer(row[name], f"{name} of {where}")
            if not text.strip():
                raise DataError(f"{name} of {where} is empty: write an answer or leave the row out")
            return text
    return None


def read_answer(value: Any, where: str) -> str:
    """Return the text of one answer.

    Raises:
        DataError: The value is none; `where` says where it stands.
    """
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
