"""Methods side by side: each trains for its time, is evaluated once, and is not trained again."""

import json

import pytest
from benchmarks.entrants import (
    FIRST_RATE,
    RATES,
    TUNING_SEED,
    Budget,
    Entrant,
    by_method,
    climb,
    results,
    spread,
    start,
    tuned,
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


@pytest.mark.parametrize(
    ("scores", "best", "looked_at"),
    [
        ([0, 1, 2, 3, 2], 3, [2, 3, 4]),  # upwards: what is below the first is worse than it
        ([0, 3, 2, 1, 4], 1, [0, 1, 2, 3]),  # downwards; beyond a worse one nobody looks
        ([1, 1, 1, 1, 1], 2, [1, 2, 3]),
        ([5, 4, 3, 2, 1], 0, [0, 1, 2, 3]),
    ],
)
def test_a_rate_is_found_by_climbing(scores, best, looked_at):
    seen = []

    def score(place):
        seen.append(place)
        return scores[place]

    assert climb(score, 2, len(scores)) == best
    assert sorted(seen) == looked_at


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


def test_each_method_is_tuned_apart_from_the_comparison(tmp_path, monkeypatch):
    asked = []

    def results_of(base, entrants, out, **options):
        (entrant,) = entrants
        asked.append((entrant.name, tuple(options["seeds"]), out))
        rate = float(entrant.overrides[-1].partition("=")[2])
        return [{"score": -abs(rate - 3e-5)}]

    monkeypatch.setattr("benchmarks.entrants.results", results_of)
    (found,) = tuned(
        [],
        [Entrant("ppo", ("--x=1",))],
        tmp_path / "rates",
        score=lambda result: result["score"],
        common=(),
        budget=Budget(steps=1),
        samples=1,
    )
    assert found == Entrant("ppo", ("--x=1", "--trainer.learning_rate=3e-5"))
    assert RATES[FIRST_RATE] == "1e-5"
    assert {name for name, *_ in asked} == {"ppo-at-1e-5", "ppo-at-3e-5", "ppo-at-5e-5"}
    assert len(asked) == 3
    assert {(seeds, out) for _, seeds, out in asked} == {((TUNING_SEED,), tmp_path / "rates")}


def test_spread_is_mean_and_standard_error():
    runs = [{"method": "a", "x": 1.0}, {"method": "b", "x": 5.0}, {"method": "a", "x": 2.0}]
    grouped = dict(by_method(runs))
    assert list(grouped) == ["a", "b"]
    # mean 1.5, deviation sqrt(.5), error sqrt(.5 / 2) = .5
    assert spread(grouped["a"], lambda run: run["x"]) == "1.500 +- 0.500"
    assert spread(grouped["b"], lambda run: run["x"]) == "5.000"
