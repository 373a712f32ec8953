"""A whole red-teaming run with one searcher through the command line, and what comes after it."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tba.cli import app
from tba.config import BuildConfig
from tba.config.model import ModelConfig
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.policy.reference import Reference
from tiny_runs import CHARACTERS, metrics, rollouts

JUDGE = """
def digits(texts):
    return [(0.2 + sum(c.isdigit() for c in text)) / (1 + len(text)) for text in texts]
"""
BUILD = {
    "characters": CHARACTERS + " ?",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
SETTINGS = """
[model.build]
{build}
[task]
kind = "redteam"
attack_prompt = "ask "
max_prompt_length = 8
victim = "{folder}/victim"
victim_template = "{{attack}}?"
victim_samples = 3
victim_max_tokens = 4
classifier = "{folder}/judge.py:digits"
min_length = 3
scoring_device = "cpu"
[search]
searchers = 1
queries_per_batch = 1
samples_per_query = 16
max_completion_length = 6
[buffer]
initial_samples = 16
on_policy_prob = 0.5
off_policy_sampling = "softmax_reward"
[objective]
kind = "tb_learned_z"
beta = {{kind = "linear", start = 0.2, end = 0.1, end_at = 0.5}}
reference_weight = {{kind = "linear", start = 0.5, end = 1.0, end_at = 0.5}}
[trainer]
steps = 6
queries_per_batch = 1
samples_per_query = 8
learning_rate = 3e-3
micro_batch_tokens = 128
[evaluation]
queries = 12
[checkpoint]
every = 0
"""


def tba(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("redteam")
    build_policy(BuildConfig(**BUILD), folder / "victim", seed=5)
    (folder / "judge.py").write_text(JUDGE)
    build = "\n".join(f"{name} = {json.dumps(value)}" for name, value in BUILD.items())
    (folder / "run.toml").write_text(SETTINGS.format(build=build, folder=folder))
    tba("train", folder / "run.toml", "--run-dir", folder / "run")
    return folder / "run"


def test_rewards_in_the_log_are_those_of_the_probabilities_beside_them(run):
    rows = rollouts(run)
    assert len(rows) >= 16
    lowest = math.log(1e-8)
    for row in rows:
        probabilities = dict(row["extras"])["probabilities"]
        assert len(probabilities) == 3
        if len(row["tokens"]) < 3:
            assert row["reward"] == pytest.approx(lowest)
            assert probabilities == [0.0] * 3
        else:
            assert row["reward"] == pytest.approx(np.log(probabilities).mean(), rel=1e-5)
    by_text = {}
    for row in rows:
        if len(row["tokens"]) >= 3:
            assert by_text.setdefault(row["text"].strip(), row["reward"]) == pytest.approx(
                row["reward"], rel=1e-4
            )


def test_attack_success_is_measured_before_and_after(run):
    summary = json.loads((run / "summary.json").read_text())
    for when in ("before", "after"):
        report = summary[when]
        assert report["queries"] == 12
        assert report["greedy_pass_at_1"] is None
        assert 0 <= report["measured"]["attack_success"] <= 1
    assert [line["beta"] for line in metrics(run)] == pytest.approx(
        [0.2, 0.2 - 0.1 / 3, 0.2 - 0.2 / 3, 0.1, 0.1, 0.1]
    )


def test_smoothing_learns_the_successful_attacks_from_the_initial_model(run):
    threshold = 0.25
    told = tba(
        "smooth",
        run,
        "--threshold",
        threshold,
        "--steps",
        20,
        "--learning-rate",
        "3e-3",
        "--batch-size",
        8,
    )
    best = {
        tuple(row["tokens"]): row
        for row in rollouts(run)
        if np.mean(dict(row["extras"])["probabilities"]) > threshold and sum(row["log_ref"]) > -100
    }
    assert best
    assert f"learned from {len(best)} of " in told
    AutoModelForCausalLM.from_pretrained(run / "smoothed")
    AutoTokenizer.from_pretrained(run / "smoothed")
    prompts = [np.array(row["prompt_ids"], np.int32) for row in best.values()]
    answers = [np.array(tokens, np.int32) for tokens in best]
    likelihood = []
    for name in ("model", "smoothed"):
        policy = load_policy(
            run / name, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32
        )
        found = Reference(policy.model, temperature=1.0).log_ref(
            prompts, answers, np.arange(len(answers))
        )
        likelihood.append(np.concatenate(found).mean())
    assert likelihood[1] > likelihood[0] + 0.1
    again = CliRunner().invoke(app, ["smooth", str(run)])
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_smoothing_says_when_nothing_was_good_enough(run):
    result = CliRunner().invoke(app, ["smooth", str(run), "--threshold", "1", "--out", "nowhere"])
    assert result.exit_code == 2
    assert "has a mean probability above 1 and log ref above -100" in result.stderr
