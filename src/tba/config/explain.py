"""Turns what the validator found into sentences that name the setting, its value and what to do."""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError

from tba.config.describe import Setting, describe, value_of
from tba.config.toml import literal

MOST_ERRORS = 2
"""More than this many at once are not read."""
MOST_CHARACTERS = 80
"""Longer values are cut."""
LEAST_SIMILARITY = 0.6
"""Less similar names are not worth suggesting."""
ELSEWHERE = {
    "num_generations": "trainer.samples_per_query, with search.samples_per_query at least as large",
    "epsilon": "objective.clip_range",
    "cliprange": "objective.clip_range",
    "clip_ratio": "objective.clip_range",
    "kl_coef": "objective.beta",
    "max_steps": "trainer.steps",
    "per_device_train_batch_size": "trainer.queries_per_batch",
    "train_batch_size": "trainer.queries_per_batch",
    "max_new_tokens": "search.max_completion_length",
    "max_response_length": "search.max_completion_length",
    "use_peft": "model.lora.rank, which switches adapters on",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
}
"""What settings of TRL and verl are called here."""


def explain(error: ValidationError, tree: Mapping[str, object]) -> str:
    """Return the first one or two errors found in `tree` as one sentence."""
    sentences = dict.fromkeys(_sentence(found, tree) for found in error.errors())
    return "; and ".join(list(sentences)[:MOST_ERRORS])


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most like `name`, whole or in its last part, or None."""

    def likeness(candidate: str) -> tuple[float, float]:
        whole = SequenceMatcher(None, name, candidate).ratio()
        last = SequenceMatcher(None, name.split(".")[-1], candidate.split(".")[-1]).ratio()
        return max(whole, last), whole

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= LEAST_SIMILARITY else None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return ` (did you mean ...?)`, or nothing when no known name is near."""
    best = nearest(name, known)
    return f" (did you mean {best}?)" if best is not None else ""


def _sentence(error: Any, tree: Mapping[str, object]) -> str:
    name = _dotted(error["loc"])
    setting = _find(name, tree)
    table = None if setting else _find(f"{name}.kind", tree)
    match error["type"]:
        case "value_error":  # a rule of ours, already a sentence
            sentence = str(error["ctx"]["error"])
        case "extra_forbidden":
            sentence = _unknown(name, error["input"], tree)
        case "missing" | "union_tag_not_found" if (wanted := setting or table) and value_of(
            wanted.name, tree
        ) is None:
            meaning = wanted.help.rstrip(".")
            sentence = f"{wanted.name} is missing, expected {wanted.type}: {meaning}"
        case _ if setting:
            sentence = _wrong(setting, value_of(setting.name, tree))
        case _ if table and isinstance(value_of(name, tree), Mapping):
            sentence = _wrong(table, value_of(table.name, tree))
        case _ if within := _find(name.rpartition(".")[0], tree):
            expected = within.type.removeprefix("table of ")
            sentence = f"{name} is {_short(error['input'])}, expected {expected}"
        case _:
            example = next(s.name for s in describe() if s.name.startswith(f"{name}."))
            sentence = f"{name} is {_short(error['input'])}, expected a table, as for {example}"
    return sentence


def _unknown(name: str, value: object, tree: Mapping[str, object]) -> str:
    while isinstance(value, Mapping) and value:  # as far down as the user wrote
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    if name.startswith("objective.") and value_of("objective.kind", tree) == "custom":
        parameter = name.removeprefix("objective.")
        return (
            f"{name} is no setting: a parameter of your function is objective.settings.{parameter}"
        )
    if (ours := ELSEWHERE.get(name.rpartition(".")[2])) is not None:
        return f"there is no setting {name}: here it is {ours}"
    elsewhere = {setting.when for setting in describe() if setting.name == name}
    is_table = any(setting.name.startswith(f"{name}.") for setting in describe())
    if len(elsewhere) == 1 and not is_table:
        return f"{name} is a setting only with {elsewhere.pop()}: set that or leave it out"
    if elsewhere or is_table:
        section = name.partition(".")[0]
        kind = value_of(f"{section}.kind", tree)
        return f"{name} is no setting of {section}.kind = {kind}: leave it out"
    names = [setting.name for setting in describe()]
    groups = {setting.name.rpartition(".")[0] for setting in describe()} - {""}
    return f"there is no setting {name}{did_you_mean(name, [*names, *sorted(groups)])}"


def _wrong(setting: Setting, value: object) -> str:
    hint = did_you_mean(str(value), setting.choices)
    return f"{setting.name} is {_short(value)}, expected {setting.type}{hint}"


def _find(name: str, tree: Mapping[str, object]) -> Setting | None:
    """Return the setting of this name that the chosen kinds have."""
    return next((s for s in describe() if s.name == name and s.holds(tree)), None)


def _dotted(location: Sequence[str | int]) -> str:
    """Return the dotted name of a validator's location, without kinds and indices on the way."""
    parts: list[str] = []
    for part in location:
        if isinstance(part, int):
            break
        name = ".".join([*parts, "kind"])
        if not any(part in s.choices for s in describe() if s.name == name):
            parts.append(part)
    return ".".join(parts)


def _short(value: object) -> str:
    text = literal(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
