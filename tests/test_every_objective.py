"""Every objective trains on the rails: searchers, buffer, trainer, checkpoint, resumption."""

import math

import pytest
import torch

import tba
from tba.objectives import OBJECTIVES
from tba.run.summary import Ending
from tba.update import PolicyUpdate
from test_docs import listed
from tiny_runs import final_tensors, metrics, rollouts, tiny_config, train

SETTINGS = {"vineppo": {"step_separator": "", "rollouts_per_prefix": 2}}
EXTRAS = {
    "subtb": {"prefix_reward", "log_ref_stop"},
    "vineppo": {"step_advantage"},
    "a_star_po": {"log_z_star"},
}
NO_KL_NO_SIGNAL = {"mle_smoothing"}  # no reward of the tiny task need pass its threshold
WITH_STATE = ["ppo", "tb_learned_z", "decoupled_ppo", "subtb"]  # heads, an anchor, extras


def config_of(folder, kind, **sections):
    objective = {"kind": kind, **SETTINGS.get(kind, {})}
    return tiny_config(folder, objective=objective, **sections)


def check(folder, kind, steps):
    lines = metrics(folder / "run")
    assert len(lines) == steps
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(line["skipped"] == 0 for line in lines)
    documented = listed("metrics.jsonl") | listed("Objectives other than tb")
    assert set(lines[-1]) <= documented, "docs/metrics.md says what each number means"
    assert kind in NO_KL_NO_SIGNAL or any(line["grad_norm"] > 0 for line in lines)
    for row in rollouts(folder / "run"):
        extras = dict(row["extras"])
        assert set(extras) == EXTRAS.get(kind, set())
        assert all(len(values) == len(row["tokens"]) for values in extras.values())


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_it_takes_steps_in_one_process(tmp_path, kind):
    summary = train(tmp_path, config_of(tmp_path, kind, trainer={"steps": 3}))
    assert (summary.ended, summary.steps, summary.bad_steps) == (Ending.FINISHED, 3, 0)
    check(tmp_path, kind, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_it_takes_steps_beside_a_searcher_of_its_own_process(tmp_path, kind):
    runtime = {"kind": "local", "trainer_threads": 1, "searcher_threads": 1}
    summary = train(tmp_path, config_of(tmp_path, kind, runtime=runtime, trainer={"steps": 12}))
    assert (summary.ended, summary.steps, summary.bad_steps) == (Ending.FINISHED, 12, 0)
    check(tmp_path, kind, steps=12)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_heads_anchor_and_extras_survive_an_interruption_bit_for_bit(tmp_path, monkeypatch, kind):
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for folder in (whole, halved):
        folder.mkdir()
    config = config_of(whole, kind, checkpoint={"every": 3}, trainer={"anchor_every": 4})
    train(whole, config)
    step = PolicyUpdate.step

    def dies(self, batch, number):
        if number == 5:
            raise KeyboardInterrupt
        return step(self, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr("tba.update.PolicyUpdate.step", dies)
        with pytest.raises(KeyboardInterrupt):
            train(halved, config)
    tba.resume(halved / "run", progress=False)
    ours, theirs = final_tensors(whole / "run"), final_tensors(halved / "run")
    assert ours.keys() == theirs.keys()
    assert any("heads" in name for name in ours) is (kind in ("ppo", "tb_learned_z"))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
