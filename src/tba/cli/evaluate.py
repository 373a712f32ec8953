"""`tba eval`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tba import api
from tba.cli.app import SETTINGS_ALLOWED, ConfigurableCommand, app, split, wide_console
from tba.config import Config
from tba.config.load import load_config
from tba.config.toml import literal
from tba.errors import ConfigError
from tba.run.folder import RunFolder


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
        typer.Option(help="Recipe or TOML file of the task. \\[default: the run's own task]"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Model to compare with. \\[default: the run's initial model, or itself]"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses sampled for each query.")] = 8,
    k: Annotated[
        str | None,
        typer.Option(help="Which pass@k to tell. \\[default: 1,2,4,... up to --samples]"),
    ] = None,
) -> None:
    """Measure a policy on a task's held-out queries, without training it."""
    sources, overrides = split(arguments, ["task", "reference", "samples", "k"])
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
    wide_console().print(table)


def _evaluation_config(source: str, task: str | None, overrides: list[str]) -> Config:
    """Return the configuration of a run, the task's recipe on top of it, for the given model."""
    folder = RunFolder(Path(source))
    bases: list[str | Config] = [folder.config()] if folder.lock_file.is_file() else []
    if task is not None:
        bases.append(task)
    if not bases:
        nothing = "" if Path(source).exists() else ", nor anything else here"
        raise ConfigError(
            f"{source} is no run folder{nothing}: give that of a run, or say by --task what to ask "
            "the model"
        )
    model = f"--model.model_name_or_path={literal(source)}"
    return load_config(bases, [model, *overrides])


def _parse_ks(text: str | None, samples: int) -> list[int]:
    if text is None:
        return [2**power for power in range(samples.bit_length())]
    ks = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= k <= samples for k in ks):
        raise ConfigError(
            f"--k is {text}, expected numbers from 1 to --samples ({samples}), such as 1,{samples}"
        )
    return ks
