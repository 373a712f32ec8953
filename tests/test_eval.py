import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.utils.logging import enable_progress_bar
from typer.testing import CliRunner

from tba import eval as evaluation
from tba.cli import app
from tba.config import BuildConfig, Config
from tba.config.load import load_config
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.eval import Pair, evaluate_models, find_models, log_probs_under
from tba.evaluation import answers, paper_perplexity
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.records import Outcome, Query, Score
from tba.run.folder import RunFolder
from tba.tasks import load_task

SMALL = BuildConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2)
SETTINGS = [
    "--evaluation.queries=12",
    "--evaluation.queries_per_batch=8",
    "--task.train_queries=20",
    "--task.test_queries=15",
    "--task.pass_threshold=-1",  # whatever is answered counts as right
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    """Return two different models built from random weights."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        build_policy(SMALL, root / str(seed), seed=seed)
    return str(root / "0"), str(root / "1")


def config(*overrides: str) -> Config:
    return load_config(["arithmetic"], [*SETTINGS, *overrides])


def test_a_policy_compared_with_itself_has_no_divergence(models):
    report = evaluate_models(config(), Pair(models[0], models[0]), samples=4, ks=[1, 4])
    assert report.queries == 12
    assert report.kl == pytest.approx(0, abs=1e-4)
    assert (report.greedy_pass_at_1, report.pass_at) == (1.0, {1: 1.0, 4: 1.0})
    assert 1 <= report.mean_response_tokens <= config().search.max_completion_length
    assert report.excluded == 0


def test_a_random_model_answers_hardly_anything_right(models):
    strict = config("--task.pass_threshold=1")
    report = evaluate_models(strict, Pair(models[0], models[0]), samples=4, ks=[1, 2, 4])
    assert 0 <= report.pass_at[1] <= report.pass_at[2] <= report.pass_at[4] <= 0.5


def test_another_reference_shows_in_divergence_and_perplexity(models):
    own = evaluate_models(config(), Pair(models[0], models[0]), samples=8, ks=[1])
    other = evaluate_models(config(), Pair(models[0], models[1]), samples=8, ks=[1])
    tokens = own.mean_response_tokens
    # Both perplexities are of the same responses, whose cross-entropies differ by the divergence.
    assert other.kl / tokens == pytest.approx(
        math.log(other.perplexity) - math.log(own.perplexity), abs=1e-4
    )
    assert other.perplexity > own.perplexity


def test_a_task_without_right_and_wrong_tells_reward_and_measures_alone(models, monkeypatch):
    def judged(config, tokenizer, **options):
        task = load_task(config, tokenizer, **options)
        return dataclasses.replace(task, pass_threshold=None, measures=(longest,))

    def longest(answered):
        return {"longest_response": float(max(len(r.tokens) for r in answered.responses))}

    monkeypatch.setattr(evaluation, "load_task", judged)
    report = evaluate_models(config(), Pair(models[0], models[0]), samples=4, ks=[1])
    assert (report.greedy_pass_at_1, report.pass_at) == (None, {})
    assert set(report.measured) == {"reward", "longest_response"}
    assert report.measured["longest_response"] >= report.mean_response_tokens
    assert "longest response" in dict(report.lines())


def test_the_papers_perplexity_divides_by_prompt_and_response():
    log_probs = [np.float32([-1, -2, -3]), np.float32([-4])]
    # (6 / (3 + 3) + 4 / (1 + 7)) / 2 = 0.75
    assert paper_perplexity(log_probs, [3, 7]) == pytest.approx(math.exp(0.75))


def test_temperature_has_no_part_in_perplexity(models):
    hot = config("--search.temperature=1e6")  # samples uniformly over the 15 tokens
    report = evaluate_models(hot, Pair(models[0], models[1]), samples=8, ks=[1])
    assert report.kl == pytest.approx(0, abs=1e-3)
    assert report.perplexity > 15  # worse than a uniform model's


class NoScorer:
    def score(self, queries, texts, tokens):
        return [Score(Outcome.OK, 0.0)] * len(texts)


def test_answers_keep_their_prompts(models):
    policy = load_policy(models[0], config().model, device=torch.device("cpu"), dtype=torch.float32)
    prompts = ["1+2=", "10+20=", "999+1="]
    queries = [
        Query(i, text, np.array(policy.tokenizer(text).input_ids, dtype=np.int32))
        for i, text in enumerate(prompts)
    ]
    given = answers(
        TorchEngine(policy.model, policy.eos_ids),
        NoScorer(),
        queries=queries,
        tokenizer=policy.tokenizer,
        pass_threshold=None,
        sampling=Sampling(3, 0.7, 6),
        queries_per_batch=2,
        seed=0,
    )
    assert given.query_of.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [query.prompt for query in given.answered.queries[::3]] == prompts
    under = log_probs_under(policy, given, 0.7)
    for response, log_probs in zip(given.answered.responses, under, strict=True):
        np.testing.assert_allclose(response.log_mu, log_probs, atol=1e-4)


def test_a_model_is_its_own_reference_unless_another_is_given():
    assert find_models("m", None) == Pair("m", "m")
    assert find_models("m", "r") == Pair("m", "r")


def test_a_run_is_its_newest_checkpoint_compared_with_its_initial_model(tmp_path, monkeypatch):
    with RunFolder.create(tmp_path, config()) as folder:
        folder.model.mkdir()
    assert find_models(str(tmp_path), None) == Pair(
        str(folder.model), str(folder.model), untrained=True
    )
    newest = SimpleNamespace(policy=Path("step-7/policy"))
    monkeypatch.setattr(evaluation, "load_newest", lambda checkpoints: newest)
    assert find_models(str(tmp_path), None) == Pair("step-7/policy", str(folder.model))
    assert find_models(str(tmp_path), "r") == Pair("step-7/policy", "r")


def test_a_run_on_a_loaded_model_has_that_as_its_reference(tmp_path):
    with RunFolder.create(tmp_path, config("--model.build=none", "--model.model_name_or_path=m")):
        pass
    assert find_models(str(tmp_path), None) == Pair("m", "m", untrained=True)


def test_command_measures_a_model_on_a_recipe(models):
    arguments = ["eval", models[0], "--task", "arithmetic", "--samples", "2"]
    result = CliRunner().invoke(app, [*arguments, *SETTINGS])
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.replace("│", " ").split())
    assert "pass@1, greedy 100.0 %" in words
    assert "pass@2, sampled 100.0 %" in words
    assert "KL to the reference, nats a response" in words


def test_no_bar_of_transformers_is_drawn_over_what_the_command_tells(models):
    enable_progress_bar()
    arguments = ["eval", models[0], "--task", "arithmetic", "--samples", "1"]
    result = CliRunner().invoke(app, [*arguments, *SETTINGS, "--evaluation.queries=2"])
    assert result.exit_code == 0, result.output
    assert "Loading weights" not in result.stderr


def test_command_measures_a_run_on_its_own_task(models, tmp_path):
    settings = ["--model.build=none", f"--model.model_name_or_path={models[1]}"]
    with RunFolder.create(tmp_path, config(*settings)):
        pass
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--evaluation.queries=3"])
    assert result.exit_code == 0, result.output
    assert "3 held-out queries" in " ".join(result.stdout.split())
    assert f"{tmp_path} has no checkpoint yet, so its initial model is measured" in result.stderr
