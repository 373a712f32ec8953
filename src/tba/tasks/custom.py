"""A task of one's own: rows from a Python file or from data files, and reward functions by name."""

import difflib
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from tba.config.search import Given
from tba.config.task import CustomTaskConfig
from tba.errors import DataError, UserCodeError
from tba.references import describe, load_file, user_code
from tba.tasks.answers import read_demonstrations, read_pairs, read_some_demonstrations
from tba.tasks.base import RewardSpec, Task
from tba.tasks.prompts import make_queries
from tba.tasks.rewards import BUILT_IN
from tba.tasks.rows import Row, read_rows, recognise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT_SEED = 0


def load_custom(
    config: CustomTaskConfig, tokenizer: "PreTrainedTokenizerBase", *, given: Given
) -> Task:
    """Read the rows, hold some out where no test rows are given, and resolve reward names.

    Raises:
        DataError: The rows cannot be used.
        UserCodeError: A Python file cannot be imported, or a reward's name means nothing.
    """
    source = config.file or config.train_file
    assert source is not None
    module = load_file(source) if config.file else None
    rows, test_rows = _python_rows(module, source) if module else _data_rows(config)
    pairs = read_pairs(rows, str(source)) if given == "pairs" else None
    shown = read_demonstrations(rows, str(source)) if given == "demonstrations" else None
    numbers: Sequence[int] = range(len(rows))
    if test_rows is None:
        numbers, held_out = hold_out(len(rows), config.test_share, str(source))
        rows, test_rows = [rows[i] for i in numbers], [rows[i] for i in held_out]
    test_source = held_out_source(config)
    test_shown = read_some_demonstrations(test_rows, test_source) if shown is not None else None
    train, kept = make_queries(rows, config, tokenizer, name=str(source))
    test, kept_test = make_queries(test_rows, config, tokenizer, name=test_source)
    own = (f"{source}:reward",) if hasattr(module, "reward") else ()
    names = config.reward or own
    return Task(
        train=train,
        test=test,
        reward=RewardSpec(
            functions=tuple(resolve(name) for name in names),
            weights=config.reward_weights or (1.0,) * len(names),
            timeout_s=config.reward_timeout_s,
        ),
        pass_threshold=config.pass_threshold,
        demonstrations=None if shown is None else [shown[numbers[i]] for i in kept],
        test_demonstrations=None if test_shown is None else [test_shown[i] for i in kept_test],
        skipped=len(rows) + len(test_rows) - len(kept) - len(kept_test),
        pairs=None if pairs is None else [pairs[numbers[i]] for i in kept],
    )


def _data_rows(config: CustomTaskConfig) -> tuple[list[Row], list[Row] | None]:
    assert config.train_file is not None
    train = recognise(read_rows(config.train_file), str(config.train_file))
    if config.test_file is None:
        return train, None
    return train, recognise(read_rows(config.test_file), str(config.test_file))


def _python_rows(module: ModuleType, path: Path) -> tuple[list[Row], list[Row] | None]:
    """Return what `train_rows()` and, where there is one, `test_rows()` of a Python file return."""
    if not hasattr(module, "train_rows"):
        raise DataError(
            f"{path} defines no train_rows(): let it return a list of rows with a prompt"
        )
    found = []
    for name in ("train_rows", "test_rows"):
        if hasattr(module, name):
            with user_code(f"{name}() of {path} failed"):
                rows = list(getattr(module, name)())
            found.append(recognise(rows, f"{name}() of {path}"))
            _require_picklable(found[-1], f"{name}() of {path}")
    return found[0], found[1] if len(found) == 2 else None


def _require_picklable(rows: Sequence[Row], source: str) -> None:
    """Check that every column can be sent to the process that calls the reward functions."""
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(
                    f"column {name!r} of row {number} of {source} cannot be sent to the scoring "
                    f"process ({describe(error)}): give numbers, texts, lists or dicts"
                ) from error


def held_out_source(config: CustomTaskConfig) -> str:
    """Say where the held-out rows come from."""
    if config.test_file is not None:
        return str(config.test_file)
    return f"the held-out rows of {config.file or config.train_file}"


def hold_out(rows: int, share: float, source: str) -> tuple[list[int], list[int]]:
    """Split off a random share, the same one every time; both parts keep their order.

    Returns:
        Positions of the rows to train on, and of those held out.

    Raises:
        DataError: There is one row only.
    """
    if rows < 2:
        raise DataError(
            f"{source} has one row only, so none can be held out: add rows, or give a file of "
            "held-out ones"
        )
    count = min(max(1, round(share * rows)), rows - 1)
    held_out = set(np.random.default_rng(SPLIT_SEED).permutation(rows)[:count].tolist())
    return [i for i in range(rows) if i not in held_out], sorted(held_out)


def resolve(name: str) -> str:
    """Return the full name of a reward: a built-in one's, or with its file's absolute path.

    Raises:
        UserCodeError: It is neither built in nor names a source.
    """
    if ":" not in name:
        if name in BUILT_IN:
            return BUILT_IN[name]
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserCodeError(
            f"there is no built-in reward {name!r}: {hint}built in are {', '.join(BUILT_IN)}; "
            "write one of your own as package.module:function or file.py:function"
        )
    source, _, function = name.rpartition(":")
    return f"{Path(source).resolve()}:{function}" if source.endswith(".py") else name
