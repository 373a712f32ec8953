"""Evaluates checkpoints beside the run, in a process of its own, so that the trainer goes on.

    Session --start(checkpoint)--> python -m tba.background RUN CHECKPOINT FILE PID --report--> take

The process loads the checkpoint's policy as anybody would, asks the held-out queries with the same
random numbers as the evaluations before and after the run, and writes a report; it is polite (a
`nice` of 10), and ends when its parent, process PID, does. One evaluation runs at a time. One that
fails or overruns its bound is told and counts for nothing: a run never ends for it.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from tba.records import EvalReport
from tba.run.durable import replace_file
from tba.run.folder import RunFolder
from tba.tasks.scoring_child import end_with

NICENESS = 10
POLL_S = 0.1
END_TIMEOUT_S = 30.0
"""Longest time for a killed process to be gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """An evaluation that is under way."""

    process: subprocess.Popen[bytes]
    """The child."""
    checkpoint: Path
    """What it evaluates."""
    report: Path
    """Where its report will be."""
    deadline: float
    """When it is killed, on the monotonic clock."""

    @property
    def step(self) -> int:
        return int(self.checkpoint.stem.removeprefix("step-"))


class BackgroundEvaluation:
    """At most one evaluation process; leaving the context kills it."""

    def __init__(self, folder: RunFolder, timeout_s: float, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._tell = tell
        self._running: _Running | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._kill(self._running)

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that is being evaluated and must not be removed."""
        return self._running.checkpoint if self._running else None

    def start(self, checkpoint: Path) -> None:
        """Begin to evaluate a checkpoint, unless an earlier one still is."""
        if self._running is not None:
            self._tell(
                f"{checkpoint.name} is not evaluated, since the evaluation of "
                f"{self._running.checkpoint.name} still goes on: set evaluation.every higher"
            )
            return
        report = self._folder.evaluations / f"{checkpoint.stem}.json"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        places = (self._folder.path, checkpoint, report)
        command = [sys.executable, "-m", "tba.background", *map(str, places), str(os.getpid())]
        try:
            with self._folder.log("evaluation").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    env=os.environ | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except OSError as error:
            self._tell(f"{checkpoint.name} is not evaluated: {error}")
            return
        deadline = time.monotonic() + self._timeout_s
        self._running = _Running(process, checkpoint, report, deadline)

    def take(self) -> EvalReport | None:
        """Return the report of an evaluation that has ended since the last call; never wait."""
        running = self._running
        if running is None:
            return None
        code = running.process.poll()
        if code is None and time.monotonic() < running.deadline:
            return None
        if code is None:
            self._kill(running)
            self._tell(
                f"the evaluation of step {running.step} took longer than evaluation.timeout_s = "
                f"{self._timeout_s:g} s and was ended"
            )
        self._running = None
        if code == 0:
            return read_report(running.report)
        if code is not None:
            self._tell(
                f"the evaluation of step {running.step} failed with exit code {code}: "
                f"{self._folder.log('evaluation')} says why"
            )
        return None

    def finish(self, interrupted: Callable[[], bool]) -> EvalReport | None:
        """Wait for the evaluation that is under way, to its bound at most, and take its report."""
        while self._running is not None and not interrupted():
            if self._running.process.poll() is not None:
                break
            if time.monotonic() >= self._running.deadline:
                break  # `take` ends it
            time.sleep(POLL_S)
        return self.take()

    def _kill(self, running: _Running) -> None:
        running.process.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel keeps it: nobody waits for that
            running.process.wait(timeout=END_TIMEOUT_S)


def read_report(path: Path) -> EvalReport:
    """Read a report of the folder `evaluations`."""
    return TypeAdapter(EvalReport).validate_json(path.read_bytes())


def main(run: str, checkpoint: str, report: str, parent: str) -> None:
    """Evaluate a checkpoint of a run, and write the report; end when the parent process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the trainer decides
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    os.nice(NICENESS)
    found = _evaluate(RunFolder(Path(run)), Path(checkpoint))
    Path(report).parent.mkdir(exist_ok=True)
    text = json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False)
    replace_file(Path(report), [text.encode()])


def _evaluate(folder: RunFolder, checkpoint: Path) -> EvalReport:
    import torch

    from tba.evaluation import evaluate_policy
    from tba.policy.loading import load_policy
    from tba.reference_answers import ReferenceAnswers
    from tba.runtimes.resources import pick_device, trainer_threads
    from tba.tasks import load_task
    from tba.tasks.scoring import Scorer

    config = folder.config()
    torch.set_num_threads(trainer_threads(config))
    device = torch.device(pick_device(config.device))
    policy = load_policy(checkpoint / "policy", config.model, device=device, dtype=torch.float32)
    task = load_task(
        config.task,
        policy.tokenizer,
        given=config.buffer.given,
        eos_ids=policy.eos_ids,
        device=str(device),
    )
    version = int(checkpoint.stem.removeprefix("step-"))
    with Scorer(task.reward) if task.reward.functions else nullcontext() as scorer:
        found = evaluate_policy(
            policy,
            scorer,
            task=task,
            config=config,
            policy_version=version,
            reference=ReferenceAnswers(folder.reference_answers),
        )
    assert found is not None, "a run that has nothing to measure starts no evaluation"
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
