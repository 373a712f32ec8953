"""Builds a `Config` from recipes, TOML files and dotted overrides; writes one back as TOML.

Later sources win, table by table. A table whose `kind` changes starts afresh, since the settings of
one kind mean nothing to another. Paths become absolute, seen from the working directory, so that a
run can be resumed from another one. Whatever is wrong comes out as a `ConfigError` of one sentence.
"""

import copy
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from tba.config import Config
from tba.config.describe import describe
from tba.config.explain import did_you_mean, explain
from tba.config.toml import dumps
from tba.errors import ConfigError

RECIPES = Path(__file__).parent.parent / "recipes"
"""Recipes live inside the package, so that every way of installing it brings them along."""

Tree = dict[str, Any]

PATHS = ("train_file", "test_file", "file")
"""Settings of a task that name files."""
_RECIPE = re.compile(r"[\w.-]+(/[\w.-]+)?(?<!\.toml)")
"""A recipe, or a variant of one."""
MODELS = ("reward_model", "judge", "victim", "classifier", "embedder")
"""Settings of a task that name models."""
SCHEDULES = ("beta", "reference_weight")
"""Settings of an objective that change over the run."""
_BARE_POINT = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")
"""Numbers that TOML does not know: `.5` and `5.`."""


def load_config(sources: Sequence[str | Config | Tree], overrides: Sequence[str] = ()) -> Config:
    """Return the run that `sources` describe, in order, with `overrides` on top.

    Args:
        sources: Names of recipes, paths of TOML files, whole configurations, or parts of one.
        overrides: `--section.key`, `value` or `--section.key=value`. A value is a TOML literal
            where it is one, otherwise text; `none` unsets.

    Raises:
        ConfigError: Something is unknown, missing, mistyped, out of range or contradictory.
    """
    tree: Tree = {}
    for layer in [*map(read_source, sources), _parse_overrides(overrides)]:
        tree = merge(_without_build(tree, layer), layer)
        _fill_kinds(tree)
        for name in SCHEDULES:
            _expand_schedule(tree, name)
    _make_paths_absolute(tree)
    try:
        # Strict JSON takes text for a path and a list for a tuple, but neither "10" nor true as 10.
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, tree)) from None


def dump_toml(config: Config) -> str:
    """Return a configuration as TOML that `load_config` reads back as the same."""
    return dumps(config.model_dump(mode="json", exclude_none=True))


def recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*/*.toml") if path.stem == path.parent.name)


def variants(recipe: str) -> list[str]:
    """Return the variants of a recipe, which are named after it: `RECIPE RECIPE/VARIANT`."""
    return sorted(path.stem for path in (RECIPES / recipe).glob("*.toml") if path.stem != recipe)


def read_source(source: str | Config | Tree) -> Tree:
    """Return what a recipe, a file or a configuration says, as nested tables.

    Raises:
        ConfigError: There is no such recipe or file, or it is no TOML.
    """
    if isinstance(source, dict):
        return copy.deepcopy(source)
    if isinstance(source, Config):
        return source.model_dump(mode="json", exclude_none=True)
    path = Path(source)
    if _RECIPE.fullmatch(source):
        path = _recipe(*source.split("/"))
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from None


def _recipe(name: str, variant: str | None = None) -> Path:
    known = recipes()
    if name not in known:
        raise ConfigError(
            f"there is no recipe {name}{did_you_mean(name, known)}: "
            f"give one of {', '.join(known)} or the path of a .toml file"
        )
    own = variants(name)
    if variant is not None and variant not in own:
        raise ConfigError(
            f"recipe {name} has no variant {variant}{did_you_mean(variant, own)}: "
            f"it has {', '.join(own) or 'none'}"
        )
    return RECIPES / name / f"{variant or name}.toml"


def merge(base: Tree, layer: Tree) -> Tree:
    """Return `base` with `layer` on top of it."""
    if "kind" in layer and layer["kind"] != base.get("kind", layer["kind"]):
        base = {}
    merged = dict(base)
    for key, value in layer.items():
        below = base.get(key)
        is_table = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = merge(cast(Tree, below), value) if is_table else value
    return merged


def _without_build(tree: Tree, layer: Tree) -> Tree:
    """Set the model that lower layers build aside, and its warm start, where a layer names one."""
    own, below = layer.get("model"), tree.get("model")
    names_one = isinstance(own, dict) and own.get("model_name_or_path") and "build" not in own
    if not (names_one and isinstance(below, dict) and below.get("build")):
        return tree
    model = {name: value for name, value in below.items() if name != "build"}
    return {**tree, "model": model, "warm_start": {}}


def _fill_kinds(tree: Tree) -> None:
    """Name the default kind in every table that names none, as if it had been written there."""
    for setting in describe():
        *parents, key = setting.name.split(".")
        if key != "kind" or setting.default == "required":
            continue
        node: Any = tree
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault("kind", tomllib.loads(f"v = {setting.default}")["v"])


def _expand_schedule(tree: Tree, name: str) -> None:
    """Take a number where a schedule of the objective may stand for a constant one."""
    objective = tree.get("objective")
    value = objective.get(name) if isinstance(objective, dict) else None
    if not isinstance(objective, dict) or type(value) not in (int, float):
        return
    expanded = {**objective, name: {"kind": "constant", "value": value}}
    wanted = (setting for setting in describe() if setting.name == f"objective.{name}.value")
    if any(setting.holds({"objective": expanded}) for setting in wanted):
        tree["objective"] = expanded


def _make_paths_absolute(tree: Tree) -> None:
    """Write out in full the files and folders that a run reads; hub names and modules stay."""
    task, model = tree.get("task"), tree.get("model")
    if isinstance(task, dict):
        task |= {key: _absolute(task[key]) for key in PATHS if isinstance(task.get(key), str)}
        if isinstance(task.get("reward"), list):
            task["reward"] = [_absolute_reference(name) for name in task["reward"]]
        task |= {key: _absolute_model(task[key]) for key in MODELS if key in task}
    objective = tree.get("objective")
    if isinstance(objective, dict) and "function" in objective:
        objective["function"] = _absolute_reference(objective["function"])
    if isinstance(model, dict) and "model_name_or_path" in model:
        model["model_name_or_path"] = _absolute_model(model["model_name_or_path"])


def _absolute(path: str) -> str:
    return str(_expanded(path).absolute())


def _absolute_model(name: object) -> object:
    """Write out the folder of a model, or the file of a function that stands in its place."""
    if isinstance(name, str) and _expanded(name).is_dir():
        return _absolute(name)
    return _absolute_reference(name)


def _expanded(path: str) -> Path:
    """Write out the home folder; an unknown ~user stays as it is."""
    return Path(os.path.expanduser(path))


def _absolute_reference(name: object) -> object:
    source, _, function = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    return f"{_absolute(source)}:{function}" if source.endswith(".py") else name


def _parse_overrides(tokens: Sequence[str]) -> Tree:
    tree: Tree = {}
    rest = iter(tokens)
    for token in rest:
        if not token.startswith("--"):
            raise ConfigError(f"{token} is not an override: write --section.key value")
        option, has_value, text = token.partition("=")
        value = text if has_value else next(rest, None)
        if value is None or (not has_value and value.startswith("--")):
            raise ConfigError(f"{option} has no value: write {option} value or {option}=value")
        name = option.removeprefix("--").replace("-", "_")
        *parents, key = name.split(".")
        node = tree
        for part in parents:
            below = node.get(part)
            node[part] = node = below if isinstance(below, dict) else {}
        node[key] = _parse_value(name, value)
    return tree


def _parse_value(name: str, text: str) -> object:
    settings = [setting for setting in describe() if setting.name == name]
    if text == "none" and (not settings or any(setting.is_optional for setting in settings)):
        return None
    is_text = any(setting.is_text for setting in settings)
    if not is_text and _BARE_POINT.fullmatch(text):
        return float(text)
    try:
        parsed: Mapping[str, object] = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["v"]
    is_literal = len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if is_literal and (isinstance(value, str) or not is_text) else text
