"""A run that a benchmark watches: what a signal has cut short is no result."""

import os
import signal

import pytest
from benchmarks.watched import run_watched

from tiny_runs import tiny_config


class Watcher:
    """Does something at the second step."""

    def __init__(self, act):
        self.act = act
        self.steps = 0

    def ready(self):
        pass

    def stepped(self, report, model, buffer, stop):
        self.steps = report.step
        if report.step == 2:
            self.act(stop)


def config(tmp_path):
    return tiny_config(tmp_path, trainer={"steps": 50})


def test_a_watcher_ends_a_run_after_its_step(tmp_path):
    watcher = Watcher(lambda stop: stop())
    run_watched(config(tmp_path), tmp_path / "run", watcher)
    assert watcher.steps == 2


def test_a_signal_ends_the_program_and_leaves_no_result(tmp_path):
    watcher = Watcher(lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="was stopped by SIGTERM"):
        run_watched(config(tmp_path), tmp_path / "run", watcher)
    assert 2 <= watcher.steps < 50
