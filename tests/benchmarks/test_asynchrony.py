"""The benchmark of asynchrony: its arithmetic, its pinning, and one small run of each kind."""

import os
import subprocess
import sys

import pytest
from benchmarks.asynchrony import Bench, Timer, corrected_ideal, ideal, lines
from benchmarks.cores import in_processes, pin

from tba.config.load import load_config
from tba.policy.build import build_policy


def test_the_ideal_speed_up_by_hand():
    assert ideal(1.0, 1.0) == 2
    assert ideal(1.0, 3.0) == pytest.approx(4 / 3)
    slowed = {"search beside training": 1.1, "training beside search": 1.25}
    assert corrected_ideal(1.0, 1.0, slowed) == pytest.approx(2 / 1.25)
    assert corrected_ideal(2.0, 1.0, slowed) == pytest.approx(3 / 2.2)


def test_a_timer_leaves_out_the_warm_up():
    timer = Timer(seconds=4.0, pinned=False)
    timer.times = [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]  # 3 s are left out: four steps of 1 s remain
    timer.waits = [9.0, 9.0, 9.0, 0.5, 0.5, 0.5, 0.5]
    timer.found = [0, 0, 100, 110, 120, 130, 140]
    assert timer.facts() == {
        "steps_per_s": 1.0,
        "search_s": 0.5,
        "train_s": 0.5,
        "idle_share": 0.5,
        "found_per_s": 10.0,
    }


def test_the_table_compares_with_the_ideal():
    turns = {"steps_per_s": 1.0, "search_s": 0.5, "train_s": 0.5, "found_per_s": 10.0}
    free = {"steps_per_s": 1.9, "found_per_s": 19.0, "idle_share": 0.002}
    both = {"steps_per_s": 1.6}
    runs = {("even", "lockstep"): turns, ("even", "free"): free, ("even", "both cores"): both}
    slowed = {"search beside training": 1.0, "training beside search": 1.0}
    header, rule, row = lines({"even": 32}, runs, slowed)
    assert header.count("|") == rule.count("|") == row.count("|")
    assert "| 0.95 of 2.00 | 0.95 of 2.00 | 1.90 | 0.20 % | 1.19 |" in row


def test_a_process_is_pinned_with_what_it_has_started():
    script = "import subprocess, sys; subprocess.run(['sleep', '30'])"
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        children = f"/proc/{parent.pid}/task/{parent.pid}/children"
        while not (found := _read(children).split()):
            pass
        core = min(os.sched_getaffinity(0))
        pin(parent.pid, core)
        for process in (parent.pid, *map(int, found)):
            assert os.sched_getaffinity(process) == {core}
    finally:
        for child in _read(children).split():
            os.kill(int(child), 9)
        parent.wait(timeout=30)


def _read(file):
    with open(file) as opened:
        return opened.read()


def _square(pipe, number):
    pipe.send(number**2)


@pytest.mark.slow  # imports in two processes
def test_results_of_processes_come_in_the_order_of_the_jobs():
    assert in_processes(_square, [(2,), (3,)]) == [4, 9]


@pytest.mark.slow  # imports in eight processes
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_runs_and_work_side_by_side_are_measured_once(tmp_path):
    build_policy(load_config(["arithmetic"]).model.build, tmp_path / "model", seed=0)
    bench = Bench(tmp_path, str(tmp_path / "model"), seconds=2.0)
    free = bench.run(8, "free", 0)
    turns = bench.run(8, "lockstep", 0)
    assert free["steps_per_s"] > 0
    assert free["idle_share"] < turns["idle_share"] < 1
    kinds = [("search", 0), ("training", 1)]
    speeds = bench.speeds(kinds)
    assert len(speeds) == 2
    assert min(speeds) > 0
    before = sorted(file.name for file in tmp_path.iterdir())
    assert (bench.run(8, "free", 0), bench.speeds(kinds)) == (free, speeds)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
