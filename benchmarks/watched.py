"""A run of the package as it is, watched step by step, without evaluations."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import nn
from transformers.utils.logging import disable_progress_bar

from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.pace import NO_ROUND
from tba.records import EvalReport, StepReport
from tba.run.folder import RunFolder
from tba.run.interrupt import StopSignal
from tba.run.progress import Progress
from tba.run.summary import Summary
from tba.runtimes import Runtime
from tba.searcher import Stage
from tba.session import Session

POLL_S = 0.01
ENDED = "the benchmark's time is up"
"""Reason of a stop that a watcher asked for."""


class Watcher(Protocol):
    """Is told what a run does, in its process."""

    def ready(self) -> None:
        """All searchers have loaded what they need: search begins (called by a thread)."""
        ...

    def stepped(
        self, report: StepReport, model: nn.Module, buffer: ReplayBuffer, stop: Callable[[], None]
    ) -> None:
        """A step is done; `stop` ends the run after it. The time spent here is the trainer's."""
        ...


class WatchedSession(Session):
    """A sitting that tells a watcher, and evaluates nothing."""

    def __init__(self, watcher: Watcher, *parts: Any) -> None:
        super().__init__(*parts)
        self._watcher = watcher

    def _evaluate(self) -> EvalReport | None:
        return None

    def _loop(self) -> None:
        waiter = threading.Thread(
            target=_wait_until_loaded, args=(self._runtime, self._watcher.ready), daemon=True
        )
        waiter.start()
        super()._loop()
        waiter.join()

    def _note(self, report: StepReport) -> None:
        super()._note(report)
        self._watcher.stepped(report, self._policy.model, self._buffer, self._end)

    def _end(self) -> None:
        self._stop.reason = ENDED


def run_watched(config: Config, run_dir: Path, watcher: Watcher) -> Summary:
    """Do a run; one that is in the folder already is deleted.

    Raises:
        SystemExit: A signal ended it, so what it came to is not the benchmark's.
    """
    disable_progress_bar()
    with (
        Progress(config.trainer.steps, console=Console(quiet=True)) as progress,
        ExitStack() as all_,
    ):
        folder = all_.enter_context(RunFolder.create(run_dir, config, clean=True))
        stop = all_.enter_context(StopSignal(progress.event))
        session = WatchedSession(watcher, config, folder, stop, progress)
        session.prepare(all_, None)
        folder.begun()
        summary = session.run()
    if stop.reason not in ("", ENDED):
        raise SystemExit(f"{run_dir} was {stop.reason}; the same command does it anew")
    return summary


def _wait_until_loaded(runtime: Runtime, ready: Callable[[], None]) -> None:
    while any(Stage.LOADING in name for name in runtime.waiting_for(NO_ROUND)):
        time.sleep(POLL_S)
    ready()
