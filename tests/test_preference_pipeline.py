"""The whole pipeline from data files: reward model, training, evaluation, Pareto plot."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tba import background, curves, pareto
from tba.cli import app
from tba.config import Config
from tba.config.load import load_config
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.eval import Pair, evaluate_models
from tba.evaluation import sampled_texts
from tba.policy.loading import load_policy
from tba.run.folder import RunFolder
from tba.tasks import load_task
from tiny_preferences import language_model, pairs, write
from tiny_runs import tiny_config, train

JUDGE = """
def vowels(completions):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]
"""
SETTINGS = """
[task]
kind = "preference"
train_file = "pairs.jsonl"
test_share = 0.2
reward_model = "rm"
missing_eos_penalty = -1.0
judge = "judge.py:vowels"
max_prompt_length = 8
scoring_device = "cpu"

[search]
queries_per_batch = 4
samples_per_query = 4
max_completion_length = 6

[buffer]
initial_samples = 16

[trainer]
steps = 4
queries_per_batch = 4
samples_per_query = 4
learning_rate = 3e-3
micro_batch_tokens = 128

[sync]
sync_every = 1

[runtime]
kind = "inline"

[evaluation]
queries = 4
every = 2

[checkpoint]
every = 2
keep = 5
"""
MEASURES = {
    "gold_reward",
    "win_rate_given",
    "win_rate_reference",
    "judge_excluded",
    "length",
    "distinct_1",
}


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return " ".join(re.sub("[│┃|]", " ", done.output).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data, a base model, a reward model and a run, all made by commands."""
    root = tmp_path_factory.mktemp("pipeline")
    base = language_model(root / "base")
    write(root / "pairs.jsonl", pairs(40))
    (root / "judge.py").write_text(JUDGE)
    (root / "task.toml").write_text(SETTINGS)
    options = ["--model", base, "--out", root / "rm", "--batch-size", 8, "--learning-rate", 1e-3]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        command("reward-model", "pairs.jsonl", *options)
        told = command(
            "train", "task.toml", "--run-dir", "run", f"--model.model_name_or_path={base}"
        )
    assert "everything about the run is in run" in told
    return root


def by_function(folder: Path) -> list[str]:
    """Return settings that spare evaluations a process which loads the reward model."""
    return ["--task.reward_model=none", f'--task.reward=["{folder}/judge.py:vowels"]']


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "eval_seconds" in line}


def test_evaluations_tell_what_the_judge_thinks(folder):
    found = evaluations(folder / "run")
    assert sorted(found) == [0, 2, 4]
    for line in found.values():
        assert {f"eval_{name}" for name in MEASURES} <= set(line)
        assert "eval_sampled_pass_at_1" not in line
    assert found[0]["eval_win_rate_reference"] == 0.5  # the initial model is the reference
    kept = json.loads((folder / "run/evaluations/reference.json").read_text())
    vowels = [sum(c in "aeiou" for c in text) for text in kept]
    assert found[0]["eval_gold_reward"] == pytest.approx(sum(vowels) / 4)


def test_an_evaluation_beside_the_run_compares_with_the_same_answers(folder):
    run = RunFolder(folder / "run")
    report = background._evaluate(run, run.checkpoints / "step-00000002")
    line = evaluations(run.path)[2]
    for name in MEASURES:
        assert report.measured[name] == pytest.approx(line[f"eval_{name}"]), name


def test_metrics_page_lists_what_a_preference_task_measures(folder):
    page = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"^## Preference tasks\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.M)
    listed = set(re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE))
    assert listed == {f"eval_{name}" for name in {*MEASURES, "distinct_2"}}


def test_the_reward_model_rewards_and_what_does_not_end_is_penalised(folder):
    from tba.run.rollouts import RolloutLog
    from tba.tasks.reward_model import RewardModel

    with RolloutLog(folder / "run/rollouts.arrows") as log:
        rows = [row for batch in log.read() for row in batch.to_pylist()]
    config = RunFolder(folder / "run").config()
    policy = policy_of(config, folder / "base")
    train_queries = load_task(config.task, policy.tokenizer).train
    prompts = {query.query_id: query.prompt for query in train_queries}
    ended = [row for row in rows if row["tokens"][-1] in policy.eos_ids]
    assert {row["reward"] for row in rows if row not in ended} == {-1.0}
    assert ended
    model = RewardModel(str(folder / "rm"), device="cpu")
    expected = model([prompts[row["query_id"]] for row in ended], [row["text"] for row in ended])
    assert [row["reward"] for row in ended] == pytest.approx(expected, abs=1e-5)


def policy_of(config: Config, path: Path):
    return load_policy(path, config.model, device=torch.device("cpu"), dtype=torch.float32)


def test_command_evaluates_a_run_and_the_judge_may_be_a_model(folder):
    words = command("eval", folder / "run", "--samples", 2, *by_function(folder))
    for name in ("win rate given", "win rate reference", "gold reward", "length", "distinct 1"):
        assert name in words
    assert "pass@1" not in words
    judge = f"--task.judge={folder / 'rm'}"
    judged = command("eval", folder / "run", "--samples", 2, *by_function(folder), judge)
    assert "win rate reference" in judged
    gold = re.compile(r"gold reward (\S+)")
    assert gold.findall(words) != gold.findall(judged)


def test_a_given_reference_is_asked_the_same_with_the_same_random_numbers(folder):
    other = folder / "run/checkpoints/step-00000004/policy"
    config = load_config([RunFolder(folder / "run").config()], by_function(folder))
    base = str(folder / "base")
    itself = evaluate_models(config, Pair(base, base), samples=3, ks=())
    assert itself.measured["win_rate_reference"] == 0.5
    report = evaluate_models(config, Pair(str(other), base), samples=3, ks=())

    def judged(path: Path) -> list[int]:
        policy = policy_of(config, path)
        texts = sampled_texts(
            TorchEngine(policy.model, policy.eos_ids),
            queries=load_task(config.task, policy.tokenizer).test[:4],
            tokenizer=policy.tokenizer,
            sampling=Sampling(3, config.search.temperature, 6),
            queries_per_batch=128 // 3,
            seed=config.seed,
        )
        return [sum(c in "aeiou" for c in text) for text in texts]

    scores = list(zip(judged(other), judged(folder / "base"), strict=True))
    assert len(scores) == 12
    by_hand = sum((own > its) + 0.5 * (own == its) for own, its in scores) / 12
    assert report.measured["win_rate_reference"] == pytest.approx(by_hand)


def test_pareto_measures_each_checkpoint_once_and_draws(folder):
    run, out = folder / "run", folder / "plot"
    options = ["--samples", 2, "--out", out, *by_function(folder)]
    words = command("pareto", run, *options)
    assert [f"measuring step {step} of" in words for step in (0, 2, 4)] == [True] * 3
    (curve,) = json.loads((out / "pareto.json").read_text())
    assert (curve["label"], [point["step"] for point in curve["points"]]) == ("tb", [0, 2, 4])
    start = curve["points"][0]["report"]
    assert start["kl"] == pytest.approx(0, abs=1e-4)
    assert start["measured"]["win_rate_reference"] == 0.5
    assert all(point["report"]["kl"] > 1e-3 for point in curve["points"][1:])
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")

    again = command("pareto", run, *options)
    assert "measuring" not in again
    assert json.loads((out / "pareto.json").read_text()) == [curve]
    fewer = command("pareto", run, *options, "--evaluation.queries=2")
    assert "measuring step 4" in fewer


def test_what_settings_name_is_marked_by_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data.jsonl", "judge.py"):
        (tmp_path / name).write_text("1")
    (tmp_path / "rm").mkdir()
    task = {"kind": "preference", "train_file": "data.jsonl", "reward": ["judge.py:vowels"]}
    task |= {"reward_model": "rm", "chat": False, "judge": "x" * 5_000, "test_share": 0.1}
    marks = curves.marks_of(task)
    assert set(marks) == {"data.jsonl", "judge.py:vowels", "rm"}
    assert curves.marks_of(task) == marks
    (tmp_path / "judge.py").write_text("2")
    (tmp_path / "rm/weights").touch()
    changed = {name for name, mark in curves.marks_of(task).items() if mark != marks[name]}
    assert changed == {"judge.py:vowels", "rm"}


def test_runs_of_one_objective_are_told_apart_by_their_folders(folder, monkeypatch):
    monkeypatch.setattr(curves, "_points", lambda *_: ())
    runs = [folder / "run", folder / "other"]
    configs = [pareto.pareto_config(folder / "run", [])] * 2
    found = curves.measure_runs(runs, configs, samples=1, tell=lambda text: None)
    labels = [curve.label for curve in found]
    assert labels == ["tb (run)", "tb (other)"]


def test_a_checkpoint_made_anew_is_measured_anew(folder, tmp_path):
    file = tmp_path / "report.json"
    report = evaluate_models(
        load_config(
            [RunFolder(folder / "run").config()], [*by_function(folder), "--evaluation.queries=1"]
        ),
        Pair(str(folder / "base"), str(folder / "base")),
        samples=1,
        ks=(),
    )
    curves._keep(file, {"checkpoint": "a"}, report)
    assert curves._kept(file, {"checkpoint": "a"}) == report
    assert curves._kept(file, {"checkpoint": "b"}) is None
    assert curves._kept(tmp_path / "none.json", {"checkpoint": "a"}) is None


def test_the_pairs_of_the_rows_train_without_search(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    settings = {
        "model.model_name_or_path": folder / "base",
        "objective.kind": "dpo",
        "buffer.given": "pairs",
        "search.searchers": 0,
        "search.max_completion_length": 9,
        "trainer.samples_per_query": 2,
        "trainer.steps": 2,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    run = tmp_path / "run"
    command("train", "task.toml", "--run-dir", run, *by_function(folder), *options)
    found = evaluations(run)
    assert sorted(found) == [0, 2]
    assert "eval_win_rate_given" in found[2]


def test_pareto_of_a_run_without_a_judge_says_how_to_name_one(folder):
    done = CliRunner().invoke(app, ["pareto", str(folder / "run"), "--task.judge", "none"])
    assert done.exit_code == 2
    assert "has no gold judge to tell win rates: name one by --task.judge" in done.stderr


def test_pareto_needs_runs_of_a_task_with_a_judge(tmp_path):
    config = tiny_config(tmp_path, trainer={"steps": 1})
    train(tmp_path, config)
    done = CliRunner().invoke(app, ["pareto", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "is a run of the task custom, in which no judge tells win rates" in done.stderr
    assert "--task.judge" not in done.stderr, "which that task does not have"
    done = CliRunner().invoke(app, ["pareto", str(tmp_path)])
    assert "is not a run folder" in done.stderr


def test_a_run_whose_judge_is_missing_ends_in_a_sentence(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    arguments = ["train", "task.toml", "--run-dir", str(tmp_path / "run"), *by_function(folder)]
    arguments += [f"--model.model_name_or_path={folder / 'base'}", "--task.judge=gone.py:judge"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "gone.py does not exist" in " ".join(done.stderr.split())
