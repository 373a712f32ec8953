"""Kills an inline run at random points until it has finished: `python kills.py FOLDER KILLS SEED`.

Each life of the run is a fork of this process, so that nothing is imported twice. A life is killed
in the middle of its n-th write, rename, synchronisation with the disk or optimiser step.
"""

import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tba
from tba import session
from tba.update import PolicyUpdate
from tiny_runs import tiny_config

SETTINGS = {
    "trainer": {"steps": 30},
    "checkpoint": {"every": 3},
    "buffer": {"on_policy_prob": 0.7},
    "sync": {"sync_every": 1, "reference_reset_every": 8},
    "search": {"searchers": 2},
}
KILLED, DONE = 9, 0
POINTS = 50  # about seven steps


def count(owner: Any, name: str, die: Callable[[], bool]) -> None:
    """Let every call of a function be a point at which the process may be killed."""
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if die():
            if name == "pwrite":  # a torn write
                real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            os._exit(KILLED)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def live(folder: Path, kill_at: int | None) -> None:
    """Begin or resume the run, and be killed at a point."""
    left = [kill_at]

    def die() -> bool:
        if left[0] is None:
            return False
        left[0] -= 1
        return left[0] < 0

    for owner, name in ((os, "pwrite"), (os, "fsync"), (os, "rename"), (PolicyUpdate, "step")):
        count(owner, name, die)
    run = folder / "run"
    if (run / "config.json").exists():
        summary = tba.resume(run, progress=False)
    else:
        config = tiny_config(folder, **SETTINGS)
        summary = tba.train(config, run_dir=run, progress=False, clean=run.exists())
    assert summary.steps == SETTINGS["trainer"]["steps"]


def main(folder: Path, kills: int, seed: int) -> None:
    """Be killed `kills` times, then finish."""
    assert session is not None
    torch.set_num_threads(1)
    points = random.Random(seed)
    killed = 0
    while True:
        kill_at = points.randrange(POINTS) if killed < kills else None
        pid = os.fork()
        if pid == 0:
            try:
                live(folder, kill_at)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(DONE)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == DONE:
            break
        if code != KILLED:
            sys.exit(f"a life ended with exit code {code}")
        killed += 1
    sys.stdout.write(f"killed {killed} times")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
