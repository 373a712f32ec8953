"""Training from Python in a line; torch is imported only when the configuration is known right."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tba.config import Config
from tba.config.load import load_config
from tba.config.sft import load_sft_config
from tba.config.toml import literal
from tba.errors import ConfigError
from tba.run.progress import Progress

if TYPE_CHECKING:
    from tba.run.summary import Summary

Load = Callable[[Sequence[str | Config], Sequence[str]], Config]
"""Makes a configuration of sources and overrides."""
RUNS = Path("runs")
"""Where runs go that are given no folder."""


def train(
    config: Config | str | Sequence[str | Config] = (),
    *,
    run_dir: str | Path | None = None,
    clean: bool = False,
    progress: bool = True,
    **settings: object,
) -> "Summary":
    """Train a policy and return what the run came to.

        tba.train("arithmetic", run_dir="runs/x", **{"trainer.steps": 10})

    Args:
        config: A recipe, the path of a TOML file, a `Config`, or several, later ones on top;
            nothing is needed where `settings` say all.
        run_dir: The run folder; by default `runs/NAME-DATE-TIME`.
        clean: Deletes the run that the folder holds already.
        progress: Shows what the run does on stderr.
        settings: Single settings by dotted name, on top of all.

    Raises:
        UserError: Something given is wrong.
        TbaError: The run could not go on; its folder can be resumed.
    """
    return _start(load_config, config, settings, run_dir=run_dir, clean=clean, progress=progress)


def sft(
    config: Config | str | Sequence[str | Config] = (),
    *,
    run_dir: str | Path | None = None,
    clean: bool = False,
    progress: bool = True,
    **settings: object,
) -> "Summary":
    """Fine-tune a policy on demonstrations and return what the run came to; `resume` goes on.

        tba.sft(run_dir="runs/x", **{"task.train_file": "rows.jsonl", ...})

    Args:
        config: As for `train`.
        run_dir: The run folder; by default `runs/NAME-DATE-TIME`.
        clean: Deletes the run that the folder holds already.
        progress: Shows what the run does on stderr.
        settings: Single settings by dotted name, on top of all.

    Raises:
        UserError: Something given is wrong.
        TbaError: The run could not go on; its folder can be resumed.
    """
    return _start(
        load_sft_config, config, settings, run_dir=run_dir, clean=clean, progress=progress
    )


def _start(
    load: Load,
    config: Config | str | Sequence[str | Config],
    settings: Mapping[str, object],
    *,
    run_dir: str | Path | None,
    clean: bool,
    progress: bool,
) -> "Summary":
    sources = [config] if isinstance(config, str | Config) else list(config)
    resolved = load(sources, [f"--{name}={literal(value)}" for name, value in settings.items()])
    folder = default_run_dir(sources) if run_dir is None else Path(run_dir)
    return run(resolved, folder, clean=clean, progress=progress)


def resume(run_dir: str | Path, *, progress: bool = True) -> "Summary":
    """Go on with a run that was interrupted, from its newest checkpoint, as it was configured.

    Raises:
        UserError: The folder holds no run, or is in use.
        TbaError: The run could not go on; its folder can be resumed.
    """
    from tba.run.folder import RunFolder

    config = RunFolder.open(Path(run_dir)).config()
    return run(config, Path(run_dir), resume=True, progress=progress)


def run(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    clean: bool = False,
    progress: bool = True,
) -> "Summary":
    """Run a configuration in a folder.

    Raises:
        ConfigError: The calling script runs again in a searcher's process.
    """
    if multiprocessing.parent_process() is not None and _is_starting():
        raise ConfigError(
            "a searcher's process runs your script again and must not train: put the call under "
            '`if __name__ == "__main__":`'
        )
    let_idle_threads_sleep()
    from tba import session

    console = Console(stderr=True, quiet=not progress)
    searches = config.search.searchers > 0
    with Progress(config.trainer.steps, searches=searches, console=console) as shown:
        return session.run(config, run_dir, resume=resume, clean=clean, progress=shown)


def let_idle_threads_sleep() -> None:
    """Call before torch is imported: spinning threads would take the cores from other processes."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _is_starting() -> bool:
    """Whether this process is still importing the script that spawned it."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def default_run_dir(sources: Sequence[str | Config], among: Path = RUNS) -> Path:
    """Return a folder NAME-DATE-TIME among others, named after the first source."""
    first = sources[0] if sources else "run"
    name = Path(first).stem if isinstance(first, str) else "run"
    return among / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
