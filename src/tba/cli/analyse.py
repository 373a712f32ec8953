"""`tba analyse`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tba import api
from tba.cli.app import app, wide_console
from tba.run.folder import RunFolder


@app.command()
def analyse(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may be alive.")],
    objectives: Annotated[
        str | None,
        typer.Option(help="Objectives to compare, such as tb,grpo. \\[default: eight usual ones]"),
    ] = None,
    bins: Annotated[
        str | None,
        typer.Option(help="Ranges of staleness. \\[default: 0,1,2-3,4-7,... as in metrics.jsonl]"),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Most queries in the batch of a range.")] = 16,
    samples: Annotated[
        int | None,
        typer.Option(
            min=2, help="Samples of each. \\[default: the run's trainer.samples_per_query]"
        ),
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="Step of the checkpoint. \\[default: the newest]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. \\[default: RUN/analysis]")
    ] = None,
) -> None:
    """Say by staleness how a run's samples and objectives fit the policy of a checkpoint."""
    RunFolder.open(run)  # answers at once that there is no run
    api.let_idle_threads_sleep()
    from tba.analyse import Plan, analyse
    from tba.analysis_report import draw_picture, tables
    from tba.staleness import parse_bins

    plan = Plan(
        objectives=None if objectives is None else tuple(objectives.split(",")),
        bins=None if bins is None else tuple(parse_bins(bins)),
        queries=queries,
        samples=samples,
        checkpoint=checkpoint,
    )
    analysis = analyse(run, plan, lambda text: print(f"tba: {text}", file=sys.stderr))
    folder = run / "analysis" if out is None else out
    analysis.write(folder)
    console = wide_console()
    for table in tables(analysis, plain=not sys.stdout.isatty()):
        console.print(table, "")
    for left_out in analysis.left_out:
        print(f"staleness {left_out.bin} is left out: {left_out.reason()}")
    if not draw_picture(analysis, folder / "analysis.png"):
        print("no picture: matplotlib is missing (the extra report)")
    print(f"step {analysis.step} of {run}: everything is in {folder}")
