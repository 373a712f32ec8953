"""The command line: `tba train`, `tba plan`, `tba eval`, `tba analyse`, `tba doctor`.

Whatever the user got wrong ends in one sentence on stderr and exit code 2; a run that could not go
on, in one sentence and exit code 1; Ctrl-C, in 130 after the run has closed. Torch is imported
inside the commands, once the configuration was validated, so that a wrong key answers at once.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from tba import api
from tba.config import Config
from tba.config.describe import Setting, describe, sections
from tba.config.explain import nearest
from tba.config.load import dump_toml, load_config, recipes
from tba.config.toml import literal
from tba.errors import ConfigError, TbaError, UserError
from tba.plan.options import length_shape, planned, searcher_counts
from tba.run.folder import RunFolder

if TYPE_CHECKING:
    from tba.plan.planning import Plan
    from tba.plan.profile import Profile
    from tba.run.summary import Summary

SETTINGS_ALLOWED = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Lets `--section.key value` pass through to the configuration."""
HELP_WIDTH = 100
PAPER_WIDTH = 160
PLANS = Path("plans")
"""Where plans go that are given no folder."""
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer does not export it
EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


class ErrorBoundary(TyperGroup):
    """The one place where errors become a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _end(str(error), EXIT_USER) from None
        except TbaError as error:
            raise _end(str(error), EXIT_FAILED) from None
        except UsageError as error:
            raise _end(cast(typer.BadParameter, error).format_message(), EXIT_USER) from None
        except KeyboardInterrupt:
            raise _end("interrupted", EXIT_INTERRUPTED) from None


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
    sources, overrides = _split(arguments or [], ["run-dir", "resume", "clean", "dry-run"])
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
    _report(summary, folder)


def _report(summary: "Summary", folder: Path) -> None:
    """Tell what a run came to; one that was stopped ends like one that Ctrl-C killed."""
    from tba.run.summary import Ending, results_table

    if summary.ended is Ending.INTERRUPTED:
        advice = f"go on with: tba train --resume {folder}"
        raise _end(f"{summary.detail} after {summary.steps} steps; {advice}", EXIT_INTERRUPTED)
    if summary.before is not None and summary.after is not None:
        Console().print(results_table(summary.before, summary.after))
    elif summary.detail:
        print(summary.detail)
    print(f"everything about the run is in {folder}")


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
        typer.Option(help="Numbers of searchers. [default: 1 to 8; --apart: 1,2,4,...,1024]"),
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
        typer.Option(help="MEAN,DEVIATION of lognormal lengths in tokens. [default: as measured]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. [default: plans/NAME-DATE-TIME]")
    ] = None,
) -> None:
    """Predict speed, idle shares and staleness of a run with N searchers, without doing it."""
    names = ["profile", "searchers", "apart", "ranks", "bandwidth", "lengths", "out"]
    sources, overrides = _split(arguments or [], names)
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

    console = Console(width=None if sys.stdout.isatty() else PAPER_WIDTH, highlight=False)
    console.print(costs_table(costs), "", plan_table(made), "", sep="\n")
    for sentence in answers(made):
        print(sentence)
    if not draw_picture(made, folder / "plan.png"):
        print("no picture: matplotlib is missing (the extra report)")
    print(f"everything is in {folder}")


@app.command("eval", cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_MODEL [--section.key value ...]",
            help="A run folder (its newest checkpoint), or folder or hub name of a model.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="Recipe or TOML file of the task. [default: the run's own task]"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Model to compare with. [default: the run's initial model, or itself]"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses sampled for each query.")] = 8,
    k: Annotated[
        str | None,
        typer.Option(help="Which pass@k to tell. [default: 1,2,4,... up to --samples]"),
    ] = None,
) -> None:
    """Measure a policy on a task's held-out queries, without training it."""
    sources, overrides = _split(arguments, ["task", "reference", "samples", "k"])
    if len(sources) != 1:
        raise ConfigError(f"eval takes one run folder or model, but was given {len(sources)}")
    config = _evaluation_config(sources[0], task, overrides)
    ks = _parse_ks(k, samples)
    api.let_idle_threads_sleep()
    from tba.eval import evaluate_models, find_models

    models = find_models(sources[0], reference)
    if models.untrained:
        note = f"tba: {sources[0]} has no checkpoint yet, so its initial model is measured"
        print(note, file=sys.stderr)
    report = evaluate_models(config, models, samples=samples, ks=ks)
    table = Table(title=f"{report.policy}: {report.queries} held-out queries", show_header=False)
    for name, value in report.lines():
        table.add_row(name, value)
    Console().print(table)


@app.command()
def analyse(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may be alive.")],
    objectives: Annotated[
        str | None,
        typer.Option(help="Objectives to compare, such as tb,grpo. [default: eight usual ones]"),
    ] = None,
    bins: Annotated[
        str | None,
        typer.Option(help="Ranges of staleness. [default: 0,1,2-3,4-7,... as in metrics.jsonl]"),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Most queries in the batch of a range.")] = 16,
    samples: Annotated[
        int | None,
        typer.Option(min=2, help="Samples of each. [default: the run's trainer.samples_per_query]"),
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="Step of the checkpoint. [default: the newest]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. [default: RUN/analysis]")
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
    console = Console(width=None if sys.stdout.isatty() else PAPER_WIDTH, highlight=False)
    for table in tables(analysis, plain=not sys.stdout.isatty()):
        console.print(table, "")
    for left_out in analysis.left_out:
        print(f"staleness {left_out.bin} is left out: {left_out.reason()}")
    if not draw_picture(analysis, folder / "analysis.png"):
        print("no picture: matplotlib is missing (the extra report)")
    print(f"step {analysis.step} of {run}: everything is in {folder}")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what is missing for which extra."""
    from tba.doctor import examine

    findings = examine()
    table = Table("", "found", "to get what is missing", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(*map(Text, (finding.what, finding.found, finding.remedy)))
    Console().print(table)
    if any(finding.is_fatal for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def main() -> None:
    """Run the command line."""
    app()


def _end(sentence: str, code: int) -> typer.Exit:
    print(f"tba: {' '.join(sentence.split())}", file=sys.stderr)
    return typer.Exit(code)


def _evaluation_config(source: str, task: str | None, overrides: list[str]) -> Config:
    """Return the configuration of a run, the task's recipe on top of it, for the given model."""
    folder = RunFolder(Path(source))
    bases: list[str | Config] = [folder.config()] if folder.lock_file.is_file() else []
    if task is not None:
        bases.append(task)
    if not bases:
        raise ConfigError(f"{source} is no run folder: say by --task what to ask the model")
    model = ["--model.build=none", f"--model.model_name_or_path={literal(source)}"]
    return load_config(bases, [*model, *overrides])


def _parse_ks(text: str | None, samples: int) -> list[int]:
    if text is None:
        return [2**power for power in range(samples.bit_length())]
    ks = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= k <= samples for k in ks):
        raise ConfigError(
            f"--k is {text}, expected numbers from 1 to --samples ({samples}), such as 1,{samples}"
        )
    return ks


def _split(arguments: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
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
