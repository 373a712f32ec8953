"""Reads data files into rows, and recognises the column names that other frameworks use.

A row is a dict with `prompt` (a string or a list of messages) and any other columns. Known forms:

    verl, SkyRL     prompt, reward_model.ground_truth  ->  prompt, ground_truth, answer
    slime           prompt, label                      ->  prompt, label, answer
    open-instruct   messages, ground_truth             ->  prompt, ground_truth, answer
    verifiers       question, answer                   ->  prompt, answer
    conversations   messages                           ->  prompt, completion, answer

Columns that were there stay; a final assistant message is no part of a prompt. That of `messages`
is the completion.
"""

import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.errors import DataError

Row = dict[str, Any]

log = logging.getLogger("tba.tasks")


def read_rows(path: Path) -> list[Row]:
    """Read a json, jsonl, csv or parquet file.

    Raises:
        DataError: The file is missing, empty, unreadable or not of its kind.
    """
    if path.suffix not in _READERS:
        raise DataError(
            f"data file {path} is none of {', '.join(_READERS)}: convert it or rename it"
        )
    try:
        rows = list(_READERS[path.suffix](path))
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"data file {path} is empty: it needs at least one row")
    return rows


def require_columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str], source: str) -> None:
    """Check that every row has the named columns.

    Raises:
        DataError: Naming the first row without one of them, and the columns it has.
    """
    wanted = tuple(names)
    for number, row in enumerate(rows, start=1):
        for name in wanted:
            if name in row and row[name] is None:
                raise DataError(f"row {number} of {source} has no value in column {name!r}")
            if name not in row:
                raise DataError(
                    f"row {number} of {source} has no column {name!r}; it has "
                    f"{', '.join(map(str, row)) or 'none'}"
                )


def recognise(rows: Sequence[Row], source: str) -> list[Row]:
    """Return the rows with `prompt` and, in a known form, `answer`; log what was inferred.

    Raises:
        DataError: A row has no prompt in any known form, or one that is no prompt.
    """
    if not rows:
        raise DataError(f"{source} has no rows: it needs at least one")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"row {number} of {source} is a {type(row).__name__}, expected an object"
            )
    form, prompt, answer = _form_of(rows[0])
    if form:
        log.info("%s: read as %s, prompt from %s and answer from %s", source, form, prompt, answer)
    require_columns(rows, (prompt,), source)
    named = [_renamed(row, prompt, answer) for row in rows]
    for number, row in enumerate(named, start=1):
        if not _is_prompt(row["prompt"]):
            raise DataError(
                f"prompt of row {number} of {source} is {row['prompt']!r:.80}, expected a "
                "string that is not empty or a list of messages with role and content"
            )
    return named


def _form_of(row: Row) -> tuple[str, str, str]:
    """Return name (none for our own), prompt column and answer column of a row's form."""
    if "prompt" in row:
        if isinstance(row.get("reward_model"), dict) and "ground_truth" in row["reward_model"]:
            return "verl or SkyRL rows", "prompt", "reward_model.ground_truth"
        if "label" in row:
            return "slime rows", "prompt", "label"
    elif "messages" in row and "ground_truth" in row:
        return "open-instruct rows", "messages", "ground_truth"
    elif "messages" in row:
        return "conversation rows", "messages", "completion"
    elif "question" in row and "answer" in row:
        return "verifiers rows", "question", "answer"
    return "", "prompt", "answer"


def _renamed(row: Row, prompt: str, answer: str) -> Row:
    messages = row[prompt]
    found = {k: v for k, v in row.items() if k != prompt}
    if isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
        if prompt == "messages":
            found.setdefault("completion", messages[-1].get("content"))
        messages = messages[:-1]
    found["prompt"] = messages
    if answer == "reward_model.ground_truth":
        found.setdefault("ground_truth", _truth(row.get("reward_model")))
        answer = "ground_truth"
    if answer in found:
        found.setdefault("answer", found[answer])
    return found


def _truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role")
            for m in prompt
        )
    )


def _read_json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise DataError(f"line {error.lineno} of {path} is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # endless numbers, endless nesting
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a JSON {type(rows).__name__}, expected a list of objects")
    for number, row in enumerate(rows, start=1):
        yield _checked_row(row, f"row {number} of {path}")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"line {number} of {path} is not JSON: {error.msg}") from error
            except (ValueError, RecursionError) as error:  # endless numbers, endless nesting
                raise DataError(f"line {number} of {path} cannot be read: {error}") from error
            yield _checked_row(row, f"line {number} of {path}")


def _checked_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object")
    return row


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # as long as texts of other formats
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise DataError(
                        f"line {reader.line_num} of {path} has more fields than the header"
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"line {reader.line_num} of {path} is not CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # here, since the scoring process imports this package and needs no pyarrow
    from pyarrow import parquet

    with path.open("rb") as file:
        try:
            yield from parquet.read_table(file).to_pylist()
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is not a Parquet file: {error}") from error


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
