"""`tba sft`."""

from pathlib import Path
from typing import Annotated

import typer

from tba import api
from tba.cli.app import SETTINGS_ALLOWED, ConfigurableCommand, app, split
from tba.cli.train import report
from tba.config.load import dump_toml
from tba.config.sft import load_sft_config
from tba.errors import ConfigError


@app.command(cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def sft(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE_OR_TOML... [--section.key value ...]",
            help="Recipes or paths of TOML files, later ones on top; then single settings.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder. [default: runs/NAME-DATE-TIME]")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete the run in --run-dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
) -> None:
    """Fine-tune a policy on demonstrations; `tba train --resume RUN` goes on with it."""
    sources, overrides = split(arguments or [], ["run-dir", "clean", "dry-run"])
    if not sources and not overrides:
        raise ConfigError(
            "nothing to learn from is named: give --task.train_file ROWS, a .toml file or a recipe"
        )
    config = load_sft_config(sources, overrides)
    if dry_run:
        print(dump_toml(config), end="")
        return
    folder = api.default_run_dir(sources or ["sft"]) if run_dir is None else run_dir
    report(api.run(config, folder, clean=clean), folder)
