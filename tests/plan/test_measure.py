import numpy as np
import pytest
import torch

from tba.errors import ConfigError
from tba.plan import contention, timing
from tba.plan.measure import measure
from tba.plan.planning import plan
from tba.plan.simulation import Setup
from tiny_runs import tiny_config


@pytest.mark.slow
def test_a_profile_has_what_the_run_would_cost_and_leaves_no_trace(tmp_path, monkeypatch):
    for module in (timing, contention):
        monkeypatch.setattr(module, "WINDOW_S", 0.05)
    config = tiny_config(tmp_path, runtime={"kind": "local"})
    told, threads = [], torch.get_num_threads()
    profile = measure(config, told.append)
    assert told[-1] == "measuring both at once"
    assert torch.get_num_threads() == threads
    assert profile.changed([]) == config
    assert set(profile.stages_s) >= {"generating", "scoring responses", "taking weights"}
    work_s = sum(profile.stages_s.values()) - profile.stages_s["taking weights"]
    tokens = 4 * 4 * np.mean(profile.responses.lengths)
    assert profile.search.seconds(tokens, 4) == pytest.approx(work_s, rel=0.3)
    assert len(profile.responses.lengths[0]) == 4
    assert profile.queries == 64
    assert profile.gradient_bytes == profile.weight_bytes  # both float32
    costs = (profile.pull_s, profile.publish_s, profile.hash_s, profile.store_s, profile.add_s)
    assert all(cost > 0 for cost in costs)
    assert profile.trainer_slowdown >= 1
    assert profile.searcher_slowdown >= 1
    made = plan(profile, config, Setup(searchers=1, warm_up=2, steps=10), [1, 2])
    assert made.points[0].steps_per_s > 0


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"runtime": {"kind": "inline"}}, "runtime.kind is inline"),
        ({"runtime": {"kind": "local"}, "objective": {"kind": "a3c"}}, "objective.kind is a3c"),
        (
            {
                "runtime": {"kind": "local"},
                "search": {"searchers": 0},
                "buffer": {"given": "pairs", "initial_samples": 0},
            },
            "search.searchers is 0",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, sections, sentence):
    with pytest.raises(ConfigError, match=sentence):
        measure(tiny_config(tmp_path, **sections), print)
