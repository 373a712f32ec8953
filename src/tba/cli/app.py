"""What all commands share: the application, its one error boundary, and settings as options."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from tba.config import Config
from tba.config.describe import Setting, describe, sections
from tba.config.explain import nearest
from tba.errors import ConfigError, TbaError, UserError

SETTINGS_ALLOWED = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Lets `--section.key value` pass through to the configuration."""
HELP_WIDTH = 100
PAPER_WIDTH = 160
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer does not export it
EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


class ErrorBoundary(TyperGroup):
    """The one place where errors become a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise end(str(error), EXIT_USER) from None
        except TbaError as error:
            raise end(str(error), EXIT_FAILED) from None
        except UsageError as error:
            raise end(cast(typer.BadParameter, error).format_message(), EXIT_USER) from None
        except KeyboardInterrupt:
            raise end("interrupted", EXIT_INTERRUPTED) from None


class ConfigurableCommand(TyperCommand):
    """A command that takes every setting as an option, and says so in its help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then the settings by section."""
        super().format_help(ctx, formatter)
        console = Console(width=None if sys.stdout.isatty() else HELP_WIDTH, highlight=False)
        console.print("Settings, given as --section.key value or in a TOML file:\n")
        console.print(_settings_table("", [s for s in describe() if "." not in s.name]))
        for name, meaning in sections().items():
            own = [setting for setting in describe() if setting.name.startswith(f"{name}.")]
            console.print(_settings_table(f"{name}: {meaning}", own))


app = typer.Typer(
    cls=ErrorBoundary,
    help="Asynchronous, off-policy reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        try:
            print(f"tba {version('tba')}")
        except PackageNotFoundError:
            print("tba, not installed")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del show_version  # its callback has seen to it


def end(sentence: str, code: int) -> typer.Exit:
    """Print the sentence that a command ends with, and return what ends it."""
    print(f"tba: {' '.join(sentence.split())}", file=sys.stderr)
    return typer.Exit(code)


def split(arguments: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part what the command line left over into sources and overrides."""
    sources: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            sources.append(word)
            continue
        name = word.lstrip("-").partition("=")[0]
        if "." not in name and name not in Config.model_fields:
            option = nearest(name, options)
            if option is not None:
                raise ConfigError(f"there is no option {word} (did you mean --{option}?)")
        overrides.append(word)
        if "=" not in word:
            overrides += [value for value in [next(rest, None)] if value is not None]
    return sources, overrides


def wide_console() -> Console:
    """Return a console for tables, which a pipe does not cut."""
    return Console(width=None if sys.stdout.isatty() else PAPER_WIDTH, highlight=False)


def _settings_table(title: str, settings: Sequence[Setting]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False
    )
    table.add_column(min_width=max(len(setting.name) for setting in describe()))
    table.add_column()
    condition = ""
    for setting in sorted(settings, key=lambda setting: setting.when != ""):
        if setting.when != condition:
            condition = setting.when
            table.add_row("", Text(f"with {condition}:", "bold"))
        is_required = setting.default == "required"
        default = "required" if is_required else f"default {setting.default}"
        value = Text(f" ({setting.type}; {default})", "dim")
        table.add_row(Text(setting.name), Text(setting.help).append_text(value))
    return table
