"""`tba smooth`."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from tba import api
from tba.cli.app import app
from tba.config.model import WarmStartConfig
from tba.errors import ConfigError
from tba.run.folder import RunFolder


@app.command()
def smooth(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with task redteam.")],
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Mean probability of harm to exceed.")
    ] = 0.7,
    min_log_ref: Annotated[
        float, typer.Option(help="log ref of the whole attack to exceed, in nats.")
    ] = -100.0,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 1_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Attacks a step.")] = 128,
    learning_rate: Annotated[
        float, typer.Option(min=1e-12, help="Peak rate of AdamW; it falls along a cosine.")
    ] = 3e-5,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the model. \\[default: RUN/smoothed]")
    ] = None,
) -> None:
    """Fine-tune a run's initial model on the attacks that succeeded (MLE smoothing)."""
    for name, value in (("--threshold", threshold), ("--min-log-ref", min_log_ref)):
        if math.isnan(value):
            raise ConfigError(f"{name} is nan, expected a number")
    RunFolder.open(run)  # answers at once that there is no run
    settings = WarmStartConfig(steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    api.let_idle_threads_sleep()
    from tba.smoothing import Choice
    from tba.smoothing import smooth as fine_tune

    done = fine_tune(
        run,
        run / "smoothed" if out is None else out,
        Choice(threshold, min_log_ref),
        settings,
        lambda text: print(f"tba: {text}", file=sys.stderr),
    )
    print(f"learned from {done.kept} of {done.attacks} attacks, loss {done.loss:.4f} nats a token")
    print(f"the model is in {done.folder}")
