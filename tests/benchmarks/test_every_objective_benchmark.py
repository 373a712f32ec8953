"""The benchmark of every objective: the settings it trains with, and what it says of a run."""

import pytest
from benchmarks.every_objective import SCHEDULED, lines, train

from tba.config.load import load_config
from tba.config.objectives import section_of
from tba.objectives import OBJECTIVES
from tba.policy.build import build_policy


def test_schedules_go_to_objectives_with_a_kl_term_of_that_name():
    assert set(SCHEDULED) <= set(OBJECTIVES)
    assert all("beta" in section_of(kind).model_fields for kind in SCHEDULED)


@pytest.mark.slow
def test_a_run_is_asynchronous_and_told_in_full(tmp_path):
    build_policy(load_config(["arithmetic"]).model.build, tmp_path / "model", seed=0)
    found = train("a3c", 4, 1e-4, tmp_path / "model")
    assert (found["objective"], found["steps"], found["bad_steps"]) == ("a3c", 4, 0)
    assert found["staleness_max"] >= 0
    header, rule, row = lines([found])
    assert header.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| a3c | 0.0")
