"""`tba train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba import api
from tba.cli.app import (
    EXIT_INTERRUPTED,
    SETTINGS_ALLOWED,
    ConfigurableCommand,
    app,
    end,
    split,
    wide_console,
)
from tba.config.load import dump_toml, load_config, recipes
from tba.errors import ConfigError

if TYPE_CHECKING:
    from tba.run.summary import Summary


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE_OR_TOML... [--section.key value ...]",
        help="Recipes or paths of TOML files, later ones on top; then single settings.",
    ),
]
RunDir = Annotated[Path | None, typer.Option(help="Run folder. \\[default: runs/NAME-DATE-TIME]")]
Clean = Annotated[bool, typer.Option("--clean", help="Delete the run in --run-dir.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
]


@app.command(cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def train(
    arguments: Arguments = None,
    run_dir: RunDir = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, as it was configured.")
    ] = None,
    clean: Clean = False,
    dry_run: DryRun = False,
) -> None:
    """Train a policy."""
    sources, overrides = split(arguments or [], ["run-dir", "resume", "clean", "dry-run"])
    if resume is None:
        start(load_config, sources, overrides, run_dir=run_dir, clean=clean, dry_run=dry_run)
        return
    if sources or overrides or run_dir is not None or clean or dry_run:
        raise ConfigError(
            f"--resume {resume} goes on with that run as it was configured: give nothing else"
        )
    _report(api.resume(resume), resume)


def start(
    load: api.Load,
    sources: Sequence[str],
    overrides: Sequence[str],
    *,
    run_dir: Path | None,
    clean: bool,
    dry_run: bool,
) -> None:
    """Train as sources and overrides say, or print the configuration that they make."""
    if not sources and not overrides:
        raise ConfigError(
            f"nothing to train is named: give a recipe ({', '.join(recipes())}), a .toml file or "
            "settings such as --task.train_file ROWS"
        )
    config = load(sources, overrides)
    if dry_run:
        print(dump_toml(config), end="")
        return
    folder = api.default_run_dir(sources) if run_dir is None else run_dir
    _report(api.run(config, folder, clean=clean), folder)


def _report(summary: "Summary", folder: Path) -> None:
    """Tell what a run came to; one that was stopped ends like one that Ctrl-C killed."""
    from tba.run.checkpoint import step_folder
    from tba.run.folder import RunFolder
    from tba.run.summary import Ending, results_table

    if summary.ended is Ending.INTERRUPTED:
        advice = f"go on with: tba train --resume {folder}"
        raise end(f"{summary.detail} after {summary.steps} steps; {advice}", EXIT_INTERRUPTED)
    if summary.before is not None and summary.after is not None:
        wide_console().print(results_table(summary.before, summary.after))
    elif summary.detail:
        print(summary.detail)
    policy = step_folder(RunFolder(folder).checkpoints, summary.steps) / "policy"
    if policy.is_dir():
        print(f"the policy, a Hugging Face folder, is {policy}")
    print(f"everything about the run is in {folder}")
