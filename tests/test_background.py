"""Evaluations beside a run: the same numbers as in the trainer's process, and never in its way."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tba.background import BackgroundEvaluation, read_report
from tba.evaluation import evaluate_policy
from tba.policy.loading import load_policy
from tba.run.folder import RunFolder
from tba.tasks import load_task
from tba.tasks.scoring import Scorer
from tiny_runs import tiny_config, train

PATIENCE_S = 60.0


def test_an_evaluation_whose_trainer_was_gone_before_it_began_ends(tmp_path):
    code = (
        "import time\n"
        "from tba import background\n"
        "background._evaluate = lambda *_: time.sleep(60)\n"
        f"background.main({str(tmp_path)!r}, 'step-00000001', 'report.json', '2')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run whose checkpoints were evaluated by other processes."""
    root = tmp_path_factory.mktemp("run")
    config = tiny_config(
        root,
        search={"searchers": 1, "temperature": 0.9},
        runtime={"kind": "local"},
        trainer={"steps": 12},
        sync={"sync_every": 2},
        evaluation={"every": 5, "queries": 4},
        checkpoint={"keep": 9},
    )
    train(root, config)
    return root / "run"


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """Return the lines of evaluations, the first and the last left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "eval_seconds" in line}


def test_a_run_evaluates_its_checkpoints_at_the_syncs_on_which_they_fall_due(run):
    reports = sorted((run / "evaluations").iterdir())
    # 5 and 10 are due; syncs are even, and one that is still busy may leave out the second
    assert [path.name for path in reports][:1] == ["step-00000006.json"]
    assert set(evaluations(run)) - {0, 12} == {read_report(path).policy_version for path in reports}


def test_the_other_process_finds_what_the_trainers_own_would(run):
    report = read_report(run / "evaluations" / "step-00000006.json")
    config = RunFolder(run).config()
    policy = load_policy(
        run / "checkpoints" / "step-00000006" / "policy",
        config.model,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    task = load_task(config.task, policy.tokenizer)
    with Scorer(task.reward) as scorer:
        own = evaluate_policy(policy, scorer, task=task, config=config, policy_version=6)
    assert dataclasses.replace(own, seconds=report.seconds) == report


def started(run: Path, checkpoint: str, timeout_s: float, told: list[str]) -> BackgroundEvaluation:
    background = BackgroundEvaluation(RunFolder(run), timeout_s, told.append)
    background.start(run / "checkpoints" / checkpoint)
    return background


def test_one_that_fails_is_told_and_where_to_look(run):
    told: list[str] = []
    with started(run, "step-00000777", PATIENCE_S, told) as background:
        assert background.finish(lambda: False) is None
        assert background.checkpoint is None
    assert told == [
        "the evaluation of step 777 failed with exit code 1: "
        f"{run / 'logs' / 'evaluation.log'} says why"
    ]
    assert "step-00000777" in (run / "logs" / "evaluation.log").read_text()


def test_one_that_overruns_its_bound_is_ended(run):
    told: list[str] = []
    with started(run, "step-00000006", 0.05, told) as background:
        assert background.finish(lambda: False) is None
    assert told == [
        "the evaluation of step 6 took longer than evaluation.timeout_s = 0.05 s and was ended"
    ]


def test_an_interruption_ends_the_waiting_for_it(run):
    told: list[str] = []
    with started(run, "step-00000006", PATIENCE_S, told) as background:
        before = time.monotonic()
        assert background.finish(lambda: True) is None
        assert time.monotonic() - before < PATIENCE_S / 2
    assert told == []


def test_one_that_cannot_even_start_is_told(run, monkeypatch):
    def no_process(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    told: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with started(run, "step-00000006", PATIENCE_S, told) as background:
        assert background.checkpoint is None
    assert told == ["step-00000006 is not evaluated: [Errno 11] Resource temporarily unavailable"]


def test_one_at_a_time_and_leaving_ends_it(run):
    told: list[str] = []
    with started(run, "step-00000006", PATIENCE_S, told) as background:
        process = background._running.process
        background.start(run / "checkpoints" / "step-00000012")
        assert background.checkpoint == run / "checkpoints" / "step-00000006"
        assert background.take() is None  # never waits
    assert len(told) == 1
    assert "step-00000012 is not evaluated" in told[0]
    assert process.poll() is not None


def test_it_ends_with_the_run_that_started_it(run):
    """The run is killed outright, and can clean nothing up."""
    code = (
        "import sys, os; from pathlib import Path; from tba.background import BackgroundEvaluation;"
        "from tba.run.folder import RunFolder; run = Path(sys.argv[1]);"
        "b = BackgroundEvaluation(RunFolder(run), 60.0, print);"
        "b.start(run / 'checkpoints' / 'step-00000006');"
        "print(b._running.process.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    before = time.monotonic()
    while Path(f"/proc/{pid}").exists() and time.monotonic() - before < PATIENCE_S:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    assert os.getpid() != pid
