"""Methods side by side: each trains for its time, is evaluated once, and is not trained again."""

import json

from benchmarks.entrants import Budget, Entrant, by_method, results, spread, start
from benchmarks.twin_math import METHODS, RECIPE, table

from tba.config import BuildConfig
from tba.config.load import load_config
from tba.policy.build import build_policy
from tiny_runs import CHARACTERS, tiny_config


def test_every_method_is_a_variant_of_the_recipe_that_can_run():
    files = ["--task.train_file=a", "--task.test_file=b", "--model.model_name_or_path=m"]
    kinds = [load_config([RECIPE], [*files, *m.overrides]).objective.kind for m in METHODS]
    assert kinds == ["tb", "dr_grpo", "rloo_proximal", "ppo", "online_dpo", "vineppo"]


def test_entrants_train_for_their_time_and_once(tmp_path):
    config = tiny_config(tmp_path, runtime={"kind": "local"}, search={"max_completion_length": 3})
    build = BuildConfig(
        characters=CHARACTERS, hidden_size=16, intermediate_size=32, num_attention_heads=2
    )
    build_policy(build, tmp_path / "model", seed=0)
    common = ["--model.build=none", f"--model.model_name_or_path={tmp_path / 'model'}"]
    entrants = [
        Entrant("tba", ()),
        Entrant("rloo", ('--objective={kind = "rloo_proximal"}',)),
    ]
    out = tmp_path / "out"
    out.mkdir()

    def found():
        return results(
            [config], entrants, out, common=common, budget=Budget(seconds=2.0), seeds=1, samples=2
        )

    first = found()
    assert [(r["method"], r["seed"]) for r in first] == [("tba", 0), ("rloo", 0)]
    for result in first:
        assert result["seconds"] >= 2.0
        assert result["steps"] > 1
        assert result["report"]["kl"] != 0  # it has learned something
    again = found()
    assert json.dumps(again) == json.dumps(json.loads(json.dumps(first)))  # read back
    begin = start([config], common, 2)
    assert abs(begin["kl"]) < 1e-3
    page = table(json.loads(json.dumps(begin)), again)
    assert "| tba | 1 |" in page
    assert page.count("\n") == 4


def test_spread_is_mean_and_standard_error():
    runs = [{"method": "a", "x": 1.0}, {"method": "b", "x": 5.0}, {"method": "a", "x": 2.0}]
    grouped = dict(by_method(runs))
    assert list(grouped) == ["a", "b"]
    # mean 1.5, deviation sqrt(.5), error sqrt(.5 / 2) = .5
    assert spread(grouped["a"], lambda run: run["x"]) == "1.500 +- 0.500"
    assert spread(grouped["b"], lambda run: run["x"]) == "5.000"
