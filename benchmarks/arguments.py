"""Reading what these programs are given, so that a wrong word is a sentence and exit code 2."""

import argparse
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path


def names(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """Return a reader of names with commas between, all of them known.

    Args:
        known: All there are.
        what: What a name is of, such as shape.
    """

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(
                f"{min(unknown) or 'nothing'} is no {what}: name some of {','.join(known)}"
            )
        return found

    return read


def count(text: str) -> int:
    """Read a number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Read numbers with commas between, each at least one."""
    return [count(word) for word in text.split(",")]


def learning_rates(text: str) -> list[str]:
    """Read learning rates with commas between, each above 0; they stay as they are written."""
    found = text.split(",")
    for word in found:
        try:
            usable = 0 < float(word) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise argparse.ArgumentTypeError(f"{word or 'nothing'} is no learning rate above 0")
    return found


def shapes(
    parser: argparse.ArgumentParser,
    asked: Sequence[str] | None,
    tiny: Mapping[str, bool],
    model: Path | None,
) -> list[str]:
    """Return the shapes to measure: those asked for, or all that there is a model for.

    Args:
        parser: Ends the program where a shape lacks its model.
        asked: Names of shapes.
        tiny: Whether a shape, by name, has a model made on the spot.
        model: Folder of the model of all others.
    """
    if model is not None and not (model / "config.json").is_file():
        parser.error(f"--model {model} is no folder with config.json: name that of SmolLM2-135M")
    found = [name for name, own in tiny.items() if own or model is not None]
    if missing := set(asked or ()) - set(found):
        parser.error(f"shape {min(missing)} needs --model, a folder with SmolLM2-135M")
    return found if asked is None else list(asked)


def keep_to(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *compared: str) -> None:
    """Make the folder `out`, whose results are all of the same arguments; others end the program.

    Args:
        parser: Ends it.
        arguments: Of this call; `out` is among them.
        compared: Names of those that results depend on and are not kept apart by.
    """
    own = {name: _told(getattr(arguments, name)) for name in compared}
    file = arguments.out / "arguments.json"
    has_results = any(path != file for path in arguments.out.rglob("*.json"))
    before = json.loads(file.read_text()) if has_results and file.is_file() else own
    for name, value in own.items():
        if before.get(name) != value:
            option = name.replace("_", "-")
            parser.error(
                f"--out {arguments.out} has results of --{option} {before.get(name)}, not {value}: "
                "name another folder"
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")  # a call beside this one writes its own
    beside.write_text(json.dumps(own))
    beside.replace(file)


def _told(value: object) -> str:
    return str(value.resolve() if isinstance(value, Path) else value)
