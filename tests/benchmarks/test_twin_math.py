"""Methods side by side: each trains for its time, is evaluated once, and is not trained again."""

import json

import pytest
from benchmarks.entrants import (
    Budget,
    Entrant,
    by_method,
    results,
    spread,
    start,
)
from benchmarks.twin_math import COMMON, METHODS, RECIPE, table

from tba.config import BuildConfig
from tba.config.load import load_config
from tba.policy.build import build_policy
from tiny_runs import CHARACTERS, tiny_config


def test_every_method_is_a_variant_of_the_recipe_that_can_run():
    files = ["--task.train_file=a", "--task.test_file=b", "--model.model_name_or_path=m"]
    configs = [load_config([RECIPE], [*COMMON, *files, *m.overrides]) for m in METHODS]
    kinds = [config.objective.kind for config in configs]
    assert kinds == ["tb", "dr_grpo", "rloo_proximal", "ppo", "online_dpo", "vineppo"]
    assert configs[-1].objective.step_separator in " 8 - 3 = 5"  # a demonstration of two steps
    for config in configs:  # so a queue's batch is a search batch
        assert config.search.queries_per_batch == config.trainer.queries_per_batch
        assert config.search.samples_per_query == config.trainer.samples_per_query


@pytest.mark.slow
def test_entrants_train_for_their_time_and_once(tmp_path):
    config = tiny_config(tmp_path, runtime={"kind": "local"}, search={"max_completion_length": 3})
    build = BuildConfig(
        characters=CHARACTERS, hidden_size=16, intermediate_size=32, num_attention_heads=2
    )
    build_policy(build, tmp_path / "model", seed=0)
    common = ["--model.build=none", f"--model.model_name_or_path={tmp_path / 'model'}"]
    entrants = [
        Entrant("tba", ()).at("3e-3"),
        Entrant("rloo", ('--objective={kind = "rloo_proximal"}',)).at("1e-3"),
    ]
    out = tmp_path / "out"
    out.mkdir()

    def found():
        return results(
            [config], entrants, out, common=common, budget=Budget(seconds=2.0), seeds=[0], samples=2
        )

    first = found()
    assert [(r["method"], r["seed"]) for r in first] == [("tba-at-3e-3", 0), ("rloo-at-1e-3", 0)]
    assert [r["learning_rate"] for r in first] == [3e-3, 1e-3]
    for result in first:
        assert result["seconds"] >= 2.0
        assert result["steps"] > 1
        assert result["report"]["kl"] != 0  # it has learned something
    again = found()
    assert json.dumps(again) == json.dumps(json.loads(json.dumps(first)))  # read back
    begin = start([config], common, 2)
    assert abs(begin["kl"]) < 1e-3
    page = table(json.loads(json.dumps(begin)), again)
    assert "| tba | 3e-3 | 1 |" in page
    assert "| rloo | 1e-3 | 1 |" in page
    assert page.count("\n") == 4


def test_spread_is_mean_and_standard_error():
    runs = [{"method": "a", "x": 1.0}, {"method": "b", "x": 5.0}, {"method": "a", "x": 2.0}]
    grouped = dict(by_method(runs))
    assert list(grouped) == ["a", "b"]
    # mean 1.5, deviation sqrt(.5), error sqrt(.5 / 2) = .5
    assert spread(grouped["a"], lambda run: run["x"]) == "1.500 +- 0.500"
    assert spread(grouped["b"], lambda run: run["x"]) == "5.000"
