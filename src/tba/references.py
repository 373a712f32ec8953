"""Imports what a user names: `file.py`, `file.py:function` or `package.module:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.errors import UserCodeError


def load_function(reference: str, role: str = "reward") -> Callable[..., Any]:
    """Import the function that `reference` names; `role` says what it is for, in messages.

    Raises:
        UserCodeError: It cannot be imported, does not exist or cannot be called.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UserCodeError(
            f"{role} function {reference!r} names no source: write "
            "package.module:function or file.py:function"
        )
    module = load_file(Path(source)) if source.endswith(".py") else _load_module(source, role)
    if not hasattr(module, name):
        functions = sorted(
            n
            for n, v in vars(module).items()
            if callable(v) and not n.startswith("_") and v.__module__ == module.__name__
        )
        raise UserCodeError(
            f"{source} has no function {name!r}; it has {', '.join(functions) or 'none at all'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise UserCodeError(
            f"{reference} is a {type(function).__name__}, but the {role} must be a function"
        )
    return function


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a module of its own; it may import its neighbours by name.

    Raises:
        UserCodeError: There is no such file, or it raises while it is imported.
    """
    if not path.is_file():
        raise UserCodeError(f"Python file {path} does not exist")
    name = f"_tba_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # last, so that a neighbour hides nothing that is installed
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    with user_code(f"Python file {path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _load_module(name: str, role: str) -> ModuleType:
    with user_code(f"{role} module {name} cannot be imported"):
        return importlib.import_module(name)


@contextmanager
def user_code(failure: str) -> Iterator[None]:
    """Turn whatever the user's code raises while it is loaded into one sentence with the cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{failure}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return type and message of an exception in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:300]
