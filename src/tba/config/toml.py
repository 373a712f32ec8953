"""Writes TOML, which the standard library only reads."""

import json
import re
from collections.abc import Iterator, Mapping

_BARE = re.compile(r"[A-Za-z0-9_-]+")
"""Keys that need no quotes."""


def literal(value: object) -> str:
    """Return a value as it stands to the right of `=`; None becomes the overrides' `none`."""
    match value:
        case None:
            text = "none"
        case bool():
            text = str(value).lower()
        case int() | float():
            text = repr(value)
        case Mapping():
            text = (
                "{"
                + ", ".join(f"{_key(key)} = {literal(item)}" for key, item in value.items())
                + "}"
            )
        case list() | tuple():
            text = "[" + ", ".join(map(literal, value)) + "]"
        case _:
            # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
            text = json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return text


def dumps(tree: Mapping[str, object]) -> str:
    """Return nested tables, which hold no None, as a TOML document."""
    return "\n".join(_lines(tree, prefix="")).lstrip("\n") + "\n"


def _lines(table: Mapping[str, object], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {literal(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{prefix}{_key(key)}]"
            yield from _lines(value, prefix=f"{prefix}{_key(key)}.")


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else literal(key)
