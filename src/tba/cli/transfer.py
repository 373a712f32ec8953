"""`tba transfer`."""

from pathlib import Path
from typing import Annotated

import typer

from tba import api
from tba.cli.app import SETTINGS_ALLOWED, ConfigurableCommand, app, split
from tba.cli.pareto import show, tell
from tba.errors import ConfigError


@app.command(cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def transfer(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [--section.key value ...]",
            help="Run folders of red-teaming tasks; then single settings.",
        ),
    ],
    victim: Annotated[
        list[str] | None,
        typer.Option(
            help="Model to attack, asked as the run's own victim, or a TOML file whose section "
            "task names it and says how; give it several times for several. "
            "\\[default: the run's own victim]"
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Attacks for each of evaluation.queries.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder of transfer.json and transfer.png.")] = Path(),
) -> None:
    """Measure the attacks of runs on other victims, and draw success over diversity."""
    runs, overrides = split(arguments, ["victim", "samples", "out"])
    if not runs:
        raise ConfigError("transfer takes one run folder or more, but was given none")
    api.let_idle_threads_sleep()
    from tba.curves import write
    from tba.transfer import draw_picture, measure_transfer, results, table

    folders = [Path(run) for run in runs]
    found = measure_transfer(folders, victim or [], overrides, samples=samples, tell=tell)
    write(results(found), out / "transfer.json")
    show(table(found), out, has_picture=draw_picture(found, out / "transfer.png"))
