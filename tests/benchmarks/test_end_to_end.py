"""The comparison with TRL: same start, paused clocks, and what counts as reaching the mark."""

import importlib.util
import json
import sys
import time

import pytest
import safetensors.torch
import torch
from benchmarks.end_to_end import best_of, lines, seconds_to, the_mark
from benchmarks.snapshots import Clock, Snapshots, grade
from benchmarks.trl_grpo import learning_rate_share

from benchmarks import end_to_end, snapshots
from tba.config.load import load_config
from tba.policy.build import build_policy
from tba.policy.loading import load_policy


def points(*pairs):
    return [{"seconds": seconds, "pass_at_1": score} for seconds, score in pairs]


THEIRS = {
    "name": "trl-1e-4",
    "layout": "1x2 threads",
    "points": points((0, 0.5), (300, 0.7), (360, 0.8), (420, 0.8), (600, 0.75)),
    "seconds": 600.0,
    "learned": 600_000,
    "found": 600_000,
    "steps": 1_200,
    "start_s": 5.0,
}
OURS = {
    **THEIRS,
    "name": "free",
    "points": points((0, 0.5), (40, 0.79), (45, 0.81), (50, 0.79), (240, 0.9)),
    "seconds": 240.0,
    "learned": 1_200_000,
    "distinct": 600_000.0,
    "new": 60_000,
}


def test_the_mark_is_the_best_of_all_rates_at_the_first_time_it_was_reached():
    worse = {**THEIRS, "name": "trl-2e-4", "points": points((0, 0.5), (600, 0.79))}
    assert the_mark([worse, THEIRS, OURS]) is THEIRS  # ours, though better, sets no mark
    assert best_of(THEIRS["points"]) == (0.8, 360)


def test_the_mark_is_reached_at_the_first_point_that_is_not_below_it():
    assert seconds_to(OURS["points"], 0.8) == 45
    assert seconds_to(OURS["points"], 0.95) is None


def test_the_table_ends_with_how_much_sooner_and_how_much_more():
    words = list(lines([THEIRS, OURS]))
    assert len({row.count("|") for row in words[:4]}) == 1  # a table: equally many cells a row
    # 360 s / 45 s = 8; (1.2e6 / 240) / (6e5 / 600) = 5
    assert "8.0x sooner and learnt from 5.0x as many" in words[-1]
    never = {**OURS, "points": points((0, 0.5))}
    assert "never reached it" in list(lines([THEIRS, never]))[-1]


def test_a_clock_stands_still_in_pauses():
    clock = Clock()
    assert clock.seconds == 0
    clock.start()
    with clock.paused():
        time.sleep(0.2)
    assert 0 < clock.seconds < 0.2


def test_trl_s_rate_warms_up_and_falls_to_zero():
    assert [learning_rate_share(s) for s in (0.0, 0.015, 0.03, 1.0, 1.1)] == [0, 0.5, 1, 0, 0]
    assert learning_rate_share(0.515) == pytest.approx(0.5)


@pytest.fixture
def policy(tmp_path):
    """Return folder, policy and settings of an untrained model."""
    folder = tmp_path / "model"
    config = load_config(["arithmetic"], ["--evaluation.queries=6"])
    build_policy(config.model.build, folder, seed=0)
    cpu = torch.device("cpu")
    return folder, load_policy(folder, config.model, device=cpu, dtype=torch.float32), config


def test_snapshots_are_kept_once_a_period(tmp_path, policy):
    _, loaded, _ = policy
    kept = Snapshots(tmp_path / "kept", every_s=2.0, dtype=torch.float32)
    for tenths in range(0, 90, 7):
        if kept.due(tenths / 10):
            kept.keep(loaded.model, tenths / 10, step=tenths)
    index = [json.loads(line) for line in (tmp_path / "kept/index.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in index] == [0, 2.1, 4.2, 6.3, 8.4]
    saved = safetensors.torch.load_file(tmp_path / "kept" / index[0]["file"])
    assert saved.keys() == dict(loaded.model.named_parameters()).keys()


def test_each_snapshot_is_graded_with_its_own_weights(tmp_path, policy, monkeypatch):
    model, loaded, config = policy
    kept = Snapshots(tmp_path / "kept", every_s=1.0, dtype=torch.float32)
    kept.keep(loaded.model, 0.0, step=0)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.fill_(2.0)
    kept.keep(loaded.model, 1.0, step=1)

    class Seen:
        def __init__(self, engine, scorer, *, queries, **_):
            assert len(queries) == config.evaluation.queries
            self.twos = all((weight == 2).all() for weight in engine.weights().values())

        def pass_at(self, k):
            return float(self.twos)

    monkeypatch.setattr(snapshots, "answers", Seen)
    index = grade(tmp_path / "kept", config, str(model))
    assert [(line["step"], line["pass_at_1"]) for line in index] == [(0, 0.0), (1, 1.0)]


@pytest.mark.slow  # imports of TRL, four times
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_a_small_race_is_run_once_and_told(tmp_path, monkeypatch, capsys):
    out = tmp_path / "race"
    arguments = ["end_to_end", "--out", str(out), "--minutes", "0.05", "--rates", "1e-4"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(end_to_end, "layouts", lambda config: SMALL_LAYOUTS)
    end_to_end.main()
    page = capsys.readouterr().out
    assert "The mark is" in page
    theirs = json.loads((out / "trl-1e-4.json").read_text())
    assert theirs["points"][0]["step"] == 0
    assert theirs["seconds"] >= 3
    for mode in ("free", "lockstep"):
        ours = json.loads((out / f"{mode}.json").read_text())
        start = theirs["points"][0]["pass_at_1"]
        assert ours["points"][0]["pass_at_1"] == pytest.approx(start, abs=0.05)  # after one step
        assert ours["learned"] == 512 * ours["steps"] > 0
    end_to_end.main()
    assert "training" not in capsys.readouterr().out


SMALL_LAYOUTS = [end_to_end.Layout(2, 1, 1, bf16=False)]
