"""Writes `docs/configuration.md` from the sections: `python -m tba.config.docs [FILE]`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from tba.config.describe import Setting, describe, sections

PAGE = Path("docs/configuration.md")

HEAD = """# Configuration

Every setting of a run, by section. A setting is given in a TOML file (`[trainer]`, `steps = 500`)
or on the command line (`--trainer.steps 500`); later files and the command line win. Values are
TOML literals, other words are text, and `none` unsets.

This page is written by `python -m tba.config.docs`.
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([HEAD, *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    yield from _table("Run", "", [s for s in describe() if "." not in s.name])
    for section, meaning in sections().items():
        yield from _table(
            section, meaning, [s for s in describe() if s.name.startswith(f"{section}.")]
        )


def _table(title: str, meaning: str, settings: list[Setting]) -> Iterator[str]:
    yield f"\n## {title}\n"
    if meaning:
        yield f"{meaning}\n"
    yield "| setting | value | default | meaning |"
    yield "|---|---|---|---|"
    for setting in settings:
        condition = f" Only with `{setting.when}`." if setting.when else ""
        default = setting.default if setting.default == "required" else f"`{setting.default}`"
        yield f"| `{setting.name}` | {setting.type} | {default} | {setting.help}{condition} |"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
