"""An objective of the user's own."""

from typing import Literal

from tba.config.base import Section


class CustomObjectiveConfig(Section):
    """A function in a Python file, of the form that `docs/objectives.md` shows."""

    kind: Literal["custom"] = "custom"
    """Objective kind."""
    function: str
    """file.py:function or package.module:function."""
    settings: dict[str, float] = {}  # noqa: RUF012 - pydantic copies it
    """Values of the function's keyword-only parameters, such as objective.settings.scale = 2; the
    others keep their defaults."""
