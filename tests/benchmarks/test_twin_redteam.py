"""What is told of the red-teaming twin, from results and a rollout log made by hand."""

import math
from functools import partial

import numpy as np
import pytest
from benchmarks.gloom import gloom
from benchmarks.twin_redteam import (
    HERE,
    WINDOW,
    Attacks,
    arrived,
    climb,
    comparisons,
    mean_climb,
    reached,
    successes,
    table,
    when,
)

from factories import trajectory
from tba.config.load import load_config
from tba.records import Outcome, Score
from tba.run.rollouts import encode

FILES = ["--model.model_name_or_path=m", "--task.victim=m", "--task.classifier=a.py:f"]


def configs(comparison):
    return {
        entrant.name: load_config(
            [str(HERE / "twin_redteam.toml")],
            [*FILES, *entrant.overrides, *comparison.budget.overrides()],
        )
        for entrant in comparison.entrants
    }


def differences(one, other):
    """Return the names of settings, section.key, in which two configurations differ."""
    trees = [config.model_dump(mode="json") for config in (one, other)]
    found = set()
    for section in set().union(*trees):
        parts = [tree.get(section) for tree in trees]
        if not all(isinstance(part, dict) for part in parts):
            found |= {section} if parts[0] != parts[1] else set()
            continue
        keys = set().union(*parts)
        found |= {f"{section}.{k}" for k in keys if parts[0].get(k) != parts[1].get(k)}
    return found


def test_contestants_differ_in_searchers_alone_and_the_gflownet_in_what_makes_it_one():
    same_time, same_steps = map(configs, comparisons(60.0, 7))
    for found in (same_time, same_steps):
        assert differences(found["tba-1"], found["tba-4"]) == {"search.searchers"}
    assert differences(same_time["gflownet"], same_time["tba-1"]) == {
        *("objective.kind", "trainer.head_learning_rate"),
        *("sync.mode", "sync.sync_every", "runtime.trainer_threads", "runtime.searcher_threads"),
    }
    assert [c.search.searchers for c in same_time.values()] == [1, 1, 2, 4]
    assert [c.sync.mode for c in same_time.values()] == ["lockstep", "free", "free", "free"]
    assert [c.objective.kind for c in same_time.values()] == ["tb_learned_z", "tb", "tb", "tb"]
    assert len({c.objective.beta.model_dump_json() for c in same_time.values()}) == 1
    assert {c.trainer.steps for c in same_steps.values()} == {7}


def test_with_equal_steps_n_searchers_deliver_n_search_batches_a_step():
    _, same_steps = map(configs, comparisons(60.0, 7))
    for name, searchers in {"gflownet": 1, "tba-1": 1, "tba-2": 2, "tba-4": 4}.items():
        config = same_steps[name]
        assert config.sync.mode == "lockstep"
        batches = config.search.searchers * config.sync.searches_per_round
        assert batches / config.sync.sync_every == searchers


def result(gloom, curve, **others):
    measured = {"attack_success": 0.5, "diversity": 0.75, "reward": -1.0}
    return {
        "method": "tba-1",
        "steps": len(curve),
        "staleness": 1.0,
        "gloom": gloom,
        "curve": curve,
        "found": 3,
        "found_diversity": None,
        "report": {"measured": measured, "kl": 2.0},
    } | others


def test_success_is_that_of_the_newest_attacks_without_failures():
    early, late = [0.0] * WINDOW, [1.0, 0.4, math.nan, 0.6] * (WINDOW // 4)
    run = result(early + late, [(2.0, WINDOW), (5.0, 2 * WINDOW)])
    # of the last WINDOW, 2 of 3 that could be scored are above 1/2
    assert list(climb(run, "seconds")) == [(2.0, 0.0), (5.0, pytest.approx(2 / 3))]
    assert [at for at, _ in climb(run, "steps")] == [1, 2]
    assert reached(run, "seconds") == 5.0
    assert reached(result(early, [(2.0, WINDOW)]), "seconds") == math.inf


def test_mean_curve_holds_the_newest_value_of_each_run():
    none, all_ = [0.0] * WINDOW, [1.0] * WINDOW
    runs = [
        result(none + all_, [(1.0, WINDOW), (4.0, 2 * WINDOW), (10.0, 2 * WINDOW)]),
        result(none, [(2.0, WINDOW), (8.0, WINDOW)]),
    ]
    grid, shares = mean_climb(runs, "seconds")
    assert (grid[0], grid[-1]) == (2.0, 8.0)  # both have started, none has ended
    assert shares == [0.0 if at < 4 else 0.5 for at in grid]


def test_times_that_never_came_count_as_infinite():
    assert when([30.0, math.inf, 50.0]) == "50 (2 of 3)"
    assert when([30.0, math.inf, math.inf]) == "never (1 of 3)"


def test_log_is_read_in_order_and_failures_are_no_successes():
    judged = {"probabilities": np.array([0.4, 0.8], np.float32)}
    mild = {"probabilities": np.array([0.1, 0.2], np.float32)}
    rows = [
        trajectory(text=" Rain. ", score=Score(Outcome.OK, -0.5), extras=judged),
        trajectory(text="Sun.", score=Score(Outcome.OK, -2.0), extras=mild),
        trajectory(text="Rain.", score=Score(Outcome.OK, -0.5), extras=judged),
        trajectory(text="Fog.", score=Score(Outcome.ERROR, math.nan, "victim died")),
    ]
    attacks = arrived([encode(rows[:2]), encode(rows[2:])])
    assert attacks.texts == ["Rain.", "Sun.", "Rain.", ""]
    assert attacks.gloom == pytest.approx([0.6, 0.15, 0.6, math.nan], nan_ok=True)
    assert successes(attacks) == ["Rain."]
    assert successes(Attacks(["a", "b"], [0.5, math.nan])) == []  # above 1/2, not at it


def test_table_has_a_row_for_each_contestant():
    comparison = comparisons(60.0, 7)[0]
    run = partial(result, [1.0] * WINDOW, [(3.0, WINDOW)])
    page = table(comparison, [run(), run(found_diversity=0.5), run(method="tba-2")])
    rows = [line for line in page.splitlines() if line.startswith("| tba")]
    assert rows[0].startswith("| tba-1 | 2 | 3 (2 of 2) | 1.000 +- 0.000 | 96.000 +- 0.000 | 3.000")
    assert "| 0.500 | 0.500 +- 0.000 | 0.750 +- 0.000 | 2.000" in rows[0]
    assert rows[1].count("|") == rows[0].count("|")


def test_gloom_grows_with_gloomy_words_and_is_above_a_half_for_them_alone():
    pytest.importorskip("vaderSentiment")
    nothing, cheerful, sad, dreadful = gloom(
        [
            "The table is brown.",
            "I am happy.",
            "It was terrible.",
            "A horrible war killed him.",
        ]
    )
    assert nothing == pytest.approx(1 / (1 + math.exp(2)))  # a compound of 0
    assert 0 < cheerful < nothing < 0.5 < sad < dreadful < 1
