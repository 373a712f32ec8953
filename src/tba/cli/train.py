"""`tba train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tba import api
from tba.cli.app import EXIT_INTERRUPTED, SETTINGS_ALLOWED, ConfigurableCommand, app, end, split
from tba.config.load import dump_toml, load_config, recipes
from tba.errors import ConfigError

if TYPE_CHECKING:
    from tba.run.summary import Summary


@app.command(cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def train(
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
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, as it was configured.")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete the run in --run-dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
) -> None:
    """Train a policy."""
    sources, overrides = split(arguments or [], ["run-dir", "resume", "clean", "dry-run"])
    if resume is not None:
        if sources or overrides or run_dir is not None or clean or dry_run:
            raise ConfigError(
                f"--resume {resume} goes on with that run as it was configured: give nothing else"
            )
        folder = resume
        summary = api.resume(folder)
    else:
        if not sources:
            raise ConfigError(
                f"nothing to train is named: give a recipe ({', '.join(recipes())}) or a .toml file"
            )
        config = load_config(sources, overrides)
        if dry_run:
            print(dump_toml(config), end="")
            return
        folder = api.default_run_dir(sources) if run_dir is None else run_dir
        summary = api.run(config, folder, clean=clean)
    report(summary, folder)


def report(summary: "Summary", folder: Path) -> None:
    """Tell what a run came to; one that was stopped ends like one that Ctrl-C killed."""
    from tba.run.checkpoint import step_folder
    from tba.run.folder import RunFolder
    from tba.run.summary import Ending, results_table

    if summary.ended is Ending.INTERRUPTED:
        advice = f"go on with: tba train --resume {folder}"
        raise end(f"{summary.detail} after {summary.steps} steps; {advice}", EXIT_INTERRUPTED)
    if summary.before is not None and summary.after is not None:
        Console().print(results_table(summary.before, summary.after))
    elif summary.detail:
        print(summary.detail)
    policy = step_folder(RunFolder(folder).checkpoints, summary.steps) / "policy"
    if policy.is_dir():
        print(f"the policy, a Hugging Face folder, is {policy}")
    print(f"everything about the run is in {folder}")
