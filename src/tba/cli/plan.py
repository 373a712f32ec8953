"""`tba plan`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba import api
from tba.cli.app import SETTINGS_ALLOWED, ConfigurableCommand, app, split, wide_console
from tba.plan.options import length_shape, planned, searcher_counts

if TYPE_CHECKING:
    from tba.plan.planning import Plan
    from tba.plan.profile import Profile

PLANS = Path("plans")
"""Where plans go that are given no folder."""


@app.command("plan", cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def make_plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE_OR_TOML... [--section.key value ...]",
            help="The run, named as for train; with --profile nothing but single settings.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Plan again from this profile, without measuring.")
    ] = None,
    searchers: Annotated[
        str | None,
        typer.Option(help="Numbers of searchers. \\[default: 1 to 8; --apart: 1,2,4,...,1024]"),
    ] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Each searcher has a machine like this one to itself.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Trainer ranks, a machine each.")] = 1,
    bandwidth: Annotated[
        float, typer.Option(min=1e-3, help="Network between machines, in GB/s.")
    ] = 10.0,
    lengths: Annotated[
        str | None,
        typer.Option(help="MEAN,DEVIATION of lognormal lengths. \\[default: as measured]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. \\[default: plans/NAME-DATE-TIME]")
    ] = None,
) -> None:
    """Predict speed, idle shares and staleness of a run with N searchers, without doing it."""
    names = ["profile", "searchers", "apart", "ranks", "bandwidth", "lengths", "out"]
    sources, overrides = split(arguments or [], names)
    config, costs = planned(sources, overrides, profile)
    counts = searcher_counts(searchers, apart=apart)
    shape = length_shape(lengths)
    folder = api.default_run_dir(sources or [str(profile)], PLANS) if out is None else out
    api.let_idle_threads_sleep()
    from tba.plan.planning import plan
    from tba.plan.simulation import Setup

    if costs is None:
        from tba.plan.measure import measure

        costs = measure(config, lambda text: print(f"tba: {text}", file=sys.stderr))
    setup = Setup(1, ranks, apart, bytes_per_s=1e9 * bandwidth, lengths=shape)
    made = plan(costs, config, setup, counts)
    costs.write(folder / "profile.json")
    made.write(folder / "plan.json")
    _report_plan(costs, made, folder)


def _report_plan(costs: "Profile", made: "Plan", folder: Path) -> None:
    """Show what was measured and what is predicted."""
    from tba.plan.report import answers, costs_table, draw_picture, plan_table

    console = wide_console()
    console.print(costs_table(costs), "", plan_table(made), "", sep="\n")
    for sentence in answers(made):
        print(sentence)
    if not draw_picture(made, folder / "plan.png"):
        print("no picture: matplotlib is missing (the extra report)")
    print(f"everything is in {folder}")
