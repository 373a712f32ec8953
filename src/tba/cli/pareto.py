"""`tba pareto`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tba import api
from tba.cli.app import SETTINGS_ALLOWED, ConfigurableCommand, app, split, wide_console
from tba.errors import ConfigError
from tba.run.folder import RunFolder


@app.command(cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def pareto(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [--section.key value ...]",
            help="Run folders of preference tasks; then single settings.",
        ),
    ],
    samples: Annotated[
        int, typer.Option(min=1, help="Responses sampled for each held-out query.")
    ] = 4,
    out: Annotated[Path, typer.Option(help="Folder of pareto.json and pareto.png.")] = Path(),
) -> None:
    """Measure KL and win rate of the checkpoints of runs, and draw one over the other."""
    runs, overrides = split(arguments, ["samples", "out"])
    if not runs:
        raise ConfigError("pareto takes one run folder or more, but was given none")
    folders = [Path(run) for run in runs]
    for folder in folders:
        RunFolder.open(folder)  # answers at once that there is no run
    api.let_idle_threads_sleep()
    from tba.curves import measure_runs, write
    from tba.pareto import draw_picture, pareto_config, table

    configs = [pareto_config(folder, overrides) for folder in folders]
    curves = measure_runs(folders, configs, samples=samples, tell=tell)
    write([asdict(curve) for curve in curves], out / "pareto.json")
    show(table(curves), out, has_picture=draw_picture(curves, out / "pareto.png"))


def tell(text: str) -> None:
    """Say on stderr what begins."""
    print(f"tba: {text}", file=sys.stderr)


def show(lines: Table, out: Path, *, has_picture: bool) -> None:
    """Print a table and say where the rest is."""
    wide_console().print(lines)
    if not has_picture:
        print("no picture: matplotlib is missing (the extra report)")
    print(f"everything is in {out}")
