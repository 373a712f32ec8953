"""`tba reward-model`: its options are the settings of `tba.config.reward_model`."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from tba import api
from tba.cli.app import app, wide_console
from tba.config.base import Section
from tba.config.reward_model import RewardModelConfig
from tba.errors import ConfigError


def with_options_of(section: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of a section, in the place of its `**settings`.

    The command line reads the types; bounds are the section's to check.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[:-1]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=... if field.is_required() else field.default,
                annotation=Annotated[field.annotation, _option(name, field.description)],
            )
            for name, field in section.model_fields.items()
        ]
        parameters = [*own, *options]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _option(name: str, text: str | None) -> Any:
    help_text = " ".join((text or "").replace("`", "").split())
    flag = f"--{name.replace('_', '-')}"
    return typer.Option(flag, help=help_text)


@app.command("reward-model")
@with_options_of(RewardModelConfig)
def reward_model(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA...",
            help="Rows with prompt, chosen and rejected: json, jsonl, csv or parquet.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the reward model.")],
    **settings: Any,
) -> None:
    """Train a Bradley-Terry reward model from pairs of completions."""
    try:
        config = RewardModelConfig(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{option} is {first['input']!r}: {first['msg']}") from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already and is left as it is: name a new folder")
    api.let_idle_threads_sleep()
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from tba.reward_model_training import train_reward_model

    def tell(text: str) -> None:
        print(f"tba: {text}", file=sys.stderr)

    disable_progress_bar()
    set_verbosity_error()  # that the new head has no weights yet is no news
    trained = train_reward_model(data, config, out=out, tell=tell)
    table = Table("held-out pairs", "before", "after", title=f"{trained.steps} steps")
    for name in ("accuracy", "loss", "mean", "std"):
        before, after = (getattr(part, name) for part in (trained.before, trained.after))
        label = f"{name} of rewards" if name in ("mean", "std") else name
        table.add_row(label, f"{before:.3f}", f"{after:.3f}")
    wide_console().print(table)
    print(f"the reward model is in {out}: set task.reward_model or task.judge to it")
