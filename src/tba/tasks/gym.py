"""Data sets of the library reasoning-gym: questions made from a seed, scored by the library.

The reward is the library's score of the response's *answer*: what it puts between `<answer>` and
`</answer>` last, or else into its last box. A response without either is an answer as a whole, and
gets the score 1 or nothing, since the library gives part of it wherever the right answer occurs.

Item i of seed s is, in nearly every data set, item i + 1 of seed s - 1. Training and held-out
questions are therefore different items of one seed, and no question is drawn twice.
"""

import dataclasses
import difflib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tba.config.task import GymTaskConfig
from tba.errors import ConfigError
from tba.references import describe
from tba.tasks.base import RewardSpec, Task
from tba.tasks.final_answer import find_box
from tba.tasks.prompts import fill, make_queries
from tba.tasks.rewards import text_of
from tba.tasks.rows import Row
from tba.tasks.templates import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DRAWS = 4
"""Items tried for each question that is wanted, since some are the same."""


def load_gym(config: GymTaskConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Make the questions; a demonstration is the library's example answer.

    Raises:
        ConfigError: The library is missing, has no such data set, refuses the options or has too
            few different questions.
    """
    template = template_text(config.prompt_template, "task.prompt_template", "question")
    rows = [
        row | {"prompt": fill(template, "task.prompt_template", {"question": row["question"]})}
        for row in _draw(config)
    ]
    test_rows, rows = rows[: config.test_queries], rows[config.test_queries :]
    name = f"data set {config.dataset}"
    train, kept = make_queries(rows, config, tokenizer, name=name)
    test, kept_test = make_queries(test_rows, config, tokenizer, name=name)
    form = "<answer>{}</answer>" if "<answer>" in template else "{}"
    answers = [rows[i]["entry"]["answer"] for i in kept]
    return Task(
        train=train,
        test=test,
        reward=RewardSpec(("tba.tasks.gym:score",), (1.0,), config.reward_timeout_s),
        pass_threshold=config.pass_threshold,
        demonstrations=None if None in answers else [form.format(a) for a in answers],
        skipped=len(rows) + len(test_rows) - len(kept) - len(kept_test),
    )


EVALUATING = frozenset(
    {
        "binary_matrix",
        "composite",  # of any others
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose scorers pass answers to `eval` or sympy's parser, as of reasoning-gym 0.1.25."""


def score(
    completions: Sequence[Any], dataset: Sequence[str], options: Sequence[str], entry: Sequence[Any]
) -> list[float]:
    """Reward each response with the library's score of its answer.

    Args:
        completions: The responses.
        dataset: Names of their data sets.
        options: The data sets' options as JSON.
        entry: The library's items, with `question`, `answer` and `metadata`.
    """
    rows = zip(completions, dataset, options, entry, strict=True)
    return [_score(text_of(c), _create(name, given), item) for c, name, given, item in rows]


def find_tagged_answer(text: str) -> str | None:
    """Return what the last `<answer>` tag or the last box holds, or None where neither is there."""
    _, tag, after = text.rpartition("<answer>")
    if tag:
        inside, closing, _ = after.partition("</answer>")
        return inside.strip() if closing else ""
    return find_box(text)


def _score(text: str, dataset: Any, item: Any) -> float:
    answer = find_tagged_answer(text)
    if answer is not None:
        return float(dataset.score_answer(answer, item))
    return float(dataset.score_answer(text.strip(), item) == 1.0)


def _draw(config: GymTaskConfig) -> list[Row]:
    """Return rows with different questions: the held-out ones first."""
    _check_name(config.dataset)
    wanted = config.test_queries + config.train_queries
    options = _as_json(config.options)
    found: dict[str, Row] = {}
    try:
        dataset = _create(config.dataset, options, config.split_seed, _DRAWS * wanted)
        for number in range(_DRAWS * wanted):
            item = dataset[number]
            found.setdefault(
                item["question"],
                {
                    "question": item["question"],
                    "dataset": config.dataset,
                    "options": options,
                    "entry": item,
                },
            )
            if len(found) == wanted:
                return list(found.values())
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"reasoning-gym cannot make data set {config.dataset} with task.options = {options} "
            f"({describe(error)}): it has the options {', '.join(_options_of(config.dataset))}"
        ) from error
    raise ConfigError(
        f"task.train_queries + task.test_queries is {wanted}, but {_DRAWS * wanted} draws from "
        f"data set {config.dataset} gave only {len(found)} different questions: ask for fewer, or "
        "widen task.options"
    )


def _check_name(name: str) -> None:
    names = _library().factory.DATASETS
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
        raise ConfigError(f"reasoning-gym has no data set {name!r}: {hint}")
    if name in EVALUATING:
        raise ConfigError(
            f"task.dataset is {name}, whose scorer in reasoning-gym evaluates what the policy "
            "writes as Python, so that a response could run any code here: choose another"
        )


@lru_cache(maxsize=8)
def _create(name: str, options: str, seed: int = 0, size: int = 1) -> Any:
    return _library().create_dataset(name, seed=seed, size=size, **json.loads(options))


def _options_of(name: str) -> list[str]:
    """Return the names of a data set's options, of which the task sets two itself."""
    _, configuration = _library().factory.DATASETS[name]
    own = {"seed", "size"}
    return [field.name for field in dataclasses.fields(configuration) if field.name not in own]


def _as_json(options: dict[str, Any]) -> str:
    try:
        return json.dumps(options, sort_keys=True)
    except TypeError as error:
        raise ConfigError(
            f"task.options is {options!r:.200}, but its values must be numbers, texts, truth "
            "values or lists and tables of these"
        ) from error


def _library() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.kind is gym, but the package {error.name} is not installed: "
            "pip install -c constraints.txt -e '.[gym]'"
        ) from error
    return reasoning_gym
