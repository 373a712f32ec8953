"""Attacks of runs meet other victims: the command, its figures, its table and picture."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tba.cli import app
from tba.config import BuildConfig
from tba.config.load import load_config
from tba.config.model import ModelConfig
from tba.curves import Axis, Curve, Panel, draw_panels, measure_runs
from tba.engines import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import ConfigError
from tba.evaluation import answers
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.records import Outcome, Score
from tba.run.folder import RunFolder
from tba.tasks import load_task
from tba.tasks.embedding import Embedder
from tba.tasks.redteam_reward import AttackReward
from tba.transfer import transfer_config
from tests.test_redteam_run import BUILD, JUDGE, SETTINGS, tba

ATTACKS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs on one victim, by two methods, and a second victim."""
    folder = tmp_path_factory.mktemp("transfer")
    for name, seed in (("victim", 5), ("other", 6)):
        build_policy(BuildConfig(**BUILD), folder / name, seed=seed)
    (folder / "judge.py").write_text(JUDGE)
    build = "\n".join(f"{name} = {json.dumps(value)}" for name, value in BUILD.items())
    (folder / "run.toml").write_text(SETTINGS.format(build=build, folder=folder))
    inline = ["--runtime.kind=inline", "--trainer.steps=2", "--evaluation.queries=1"]
    tba("train", folder / "run.toml", "--run-dir", folder / "one", *inline)
    tba("train", folder / "run.toml", "--run-dir", folder / "two", *inline, "--objective.kind=tb")
    (folder / "other.toml").write_text(
        f'[task]\nvictim = "{folder}/other"\nvictim_template = "{{attack}}= "\n'
    )
    return folder


def transfer(folder, out, *more):
    words = [
        *(folder / "one", folder / "two", "--out", out),
        *("--victim", folder / "victim", "--victim", folder / "other.toml"),
        *(f"--evaluation.queries={ATTACKS}", f"--task.embedder={folder}/victim", *more),
    ]
    return tba("transfer", *words)


@pytest.fixture(scope="module")
def measured(folder):
    told = transfer(folder, folder / "out")
    return told, json.loads((folder / "out/transfer.json").read_text())


class Unscored:
    """Scores nothing."""

    def score(self, queries, texts, tokens):
        return [Score(Outcome.OK, 0.0)] * len(queries)


def by_hand(folder: Path, run: Path, step: int, victim: str) -> dict[str, float]:
    """Sample the attacks of a policy, score each alone and compare all with all."""
    config = transfer_config(run, victim, [f"--task.embedder={folder}/victim"])
    path = run / f"checkpoints/step-{step:08d}/policy" if step else run / "model"
    policy = load_policy(path, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32)
    task = load_task(config.task, policy.tokenizer)
    answered = answers(
        TorchEngine(policy.model, policy.eos_ids),
        Unscored(),
        queries=task.test[:ATTACKS],
        tokenizer=policy.tokenizer,
        pass_threshold=None,
        sampling=Sampling(1, config.search.temperature, config.search.max_completion_length),
        queries_per_batch=config.evaluation.queries_per_batch,
        seed=config.seed,
    ).answered
    texts = answered.texts
    (options,) = task.reward.options
    score = AttackReward(**options)
    p, rewards = [], []
    for text, response in zip(texts, answered.responses, strict=True):
        (graded,) = score([text], [response.tokens.tolist()])
        p.append(graded["probabilities"].mean())
        rewards.append(graded["score"])
    rows = torch.from_numpy(Embedder(f"{folder}/victim", "cpu")(texts)).double()
    cosine = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
    off = cosine[~torch.eye(len(texts), dtype=torch.bool)]
    return {
        "attack_success": float(np.mean(np.array(p) > 0.5)),
        "diversity": 1 - off.mean().item(),
        "reward": float(np.mean(rewards)),
    }


@pytest.mark.slow
def test_success_and_diversity_of_each_checkpoint_on_each_victim_are_those_found_by_hand(
    folder, measured
):
    _, found = measured
    assert [own["victim"] for own in found] == [f"{folder}/victim", f"{folder}/other.toml"]
    for own in found:
        assert [curve["label"] for curve in own["curves"]] == ["tb_learned_z", "tb"]
        for curve in own["curves"]:
            assert [point["step"] for point in curve["points"]] == [0, 2]
            for point in curve["points"]:
                seen = point["report"]["measured"]
                expected = by_hand(folder, Path(curve["run"]), point["step"], own["victim"])
                for name, value in expected.items():
                    assert seen[name] == pytest.approx(value, abs=1e-5), (curve["label"], name)
    first, second = (
        [p["report"]["measured"] for curve in own["curves"] for p in curve["points"]]
        for own in found
    )
    assert [m["diversity"] for m in first] == pytest.approx([m["diversity"] for m in second])
    assert [m["reward"] for m in first] != pytest.approx([m["reward"] for m in second])


@pytest.mark.slow
def test_the_table_has_a_line_for_each_policy_and_victim_and_the_picture_is_drawn(folder, measured):
    told, found = measured
    for title in ("attack success", "diversity", "reward"):
        assert title in told
    lines = [line for line in told.splitlines() if "tb" in line and "│" in line]
    assert len(lines) == 2 * 2 * 2
    assert (folder / "out/transfer.png").read_bytes().startswith(b"\x89PNG")
    assert told.count("measuring step") == 8
    again = transfer(folder, folder / "out")
    assert "measuring" not in again, "what was measured is read again"
    assert json.loads((folder / "out/transfer.json").read_text()) == found


@pytest.mark.slow
def test_the_settings_of_a_victim_s_file_and_of_the_command_line_go_on_top(folder):
    named = [f"--task.embedder={folder}/victim", "--task.victim_samples=7"]
    config = transfer_config(folder / "one", f"{folder}/other.toml", named)
    assert (config.task.victim, config.task.victim_template) == (f"{folder}/other", "{attack}= ")
    assert config.task.victim_samples == 7
    own = transfer_config(folder / "one", None, named)
    assert own.task.victim == RunFolder(folder / "one").config().task.victim


@pytest.mark.slow
def test_a_victim_s_file_changes_nothing_but_the_task(folder):
    file = folder / "whole.toml"
    file.write_text(f'seed = 7\n[search]\ntemperature = 0.3\n[task]\nvictim = "{folder}/other"\n')
    named = [f"--task.embedder={folder}/victim"]
    config = transfer_config(folder / "one", str(file), named)
    own = transfer_config(folder / "one", None, named)
    assert config.task.victim == f"{folder}/other"
    assert (config.seed, config.search) == (own.seed, own.search)
    file.write_text("seed = 7\n")
    with pytest.raises(ConfigError, match=r"whole\.toml has no section \[task\]"):
        transfer_config(folder / "one", str(file), named)


def test_runs_of_the_same_name_are_told_apart(monkeypatch):
    monkeypatch.setattr("tba.curves._points", lambda *_: ())
    config = load_config(["arithmetic"])
    runs = [Path("a/run"), Path("b/run"), Path("c/other")]
    curves = measure_runs(runs, [config] * 3, samples=1, tell=print)
    kind = config.objective.kind
    assert [c.label for c in curves] == [f"{kind} (a/run)", f"{kind} (b/run)", f"{kind} (other)"]


def test_a_name_is_no_formula(tmp_path):
    curve = Curve("run", r"v$\foo$x", ())
    axis = Axis("kl", "KL")
    assert draw_panels([Panel([curve], axis, axis, title=r"v$\foo$x")], tmp_path / "p.png")


@pytest.mark.slow
def test_a_kept_report_that_is_broken_is_measured_again(folder, measured):
    (file, *_) = sorted((folder / "one/evaluations").glob("curve-00000002-*.json"))
    for content in ('{"x": 1}', file.read_text()[:40]):
        file.write_text(content)
        assert transfer(folder, folder / "out").count("measuring step") == 1


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused_in_a_sentence(folder):
    result = CliRunner().invoke(app, ["transfer", str(folder / "one")])
    assert result.exit_code == 2
    assert "has no sentence encoder to tell the diversity" in result.output
    result = CliRunner().invoke(app, ["transfer"])
    assert result.exit_code == 2
