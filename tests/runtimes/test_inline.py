"""The inline runtime: bit for bit the same, also when it was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_runs import final_tensors, metrics, rollouts, tiny_config, train

STEPS = 30


def assert_same_run(a: Path, b: Path) -> None:
    """Assert that two runs found and learnt the same, bit for bit."""
    first, second = final_tensors(a), final_tensors(b)
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    rows, again = rollouts(a), rollouts(b)
    assert len(rows) == len(again)
    for row, other in zip(rows, again, strict=True):
        assert repr(row) == repr(other)  # NaN equals NaN
    timeless = ("loss", "grad_norm", "staleness_mean", "buffer_size", "step")
    lines, others = ([[x[n] for n in timeless] for x in metrics(run)] for run in (a, b))
    assert lines == others


@pytest.mark.parametrize(
    "mode", ["free", "barrier", pytest.param("lockstep", marks=pytest.mark.slow)]
)
def test_two_runs_are_the_same_bit_for_bit_and_another_seed_differs(tmp_path, mode):
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = tmp_path / name
        folder.mkdir()
        config = tiny_config(
            tmp_path,
            search={"searchers": 2},
            sync={"mode": mode, "sync_every": 2, "reference_reset_every": 3},
        )
        train(folder, config.model_copy(update={"seed": seed}))
        runs.append(folder / "run")
    assert_same_run(runs[0], runs[1])
    first, other = final_tensors(runs[0]), final_tensors(runs[2])
    assert not any(
        torch.equal(first[name], other[name])
        for name in first
        if "norm" not in name and not name.endswith("step")
    )
    assert [r["tokens"] for r in rollouts(runs[0])] != [r["tokens"] for r in rollouts(runs[2])]


def live_and_die(folder: Path, kills: int, seed: int) -> str:
    folder.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("kills.py")),
            str(folder),
            str(kills),
            str(seed),
        ],
        env={
            **os.environ,
            "PYTHONPATH": ":".join(sys.path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1_800)
@pytest.mark.slow
def test_a_run_killed_at_ten_random_points_ends_as_one_that_was_not(tmp_path):
    live_and_die(tmp_path / "whole", kills=0, seed=0)
    output = live_and_die(tmp_path / "killed", kills=10, seed=3)
    assert output == "killed 10 times"
    assert_same_run(tmp_path / "whole/run", tmp_path / "killed/run")
    assert [x["step"] for x in metrics(tmp_path / "killed/run")] == list(range(1, STEPS + 1))
