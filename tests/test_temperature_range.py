"""Search batches at temperatures of their own."""

import numpy as np
import pytest
import torch

from tba.config.model import ModelConfig
from tba.errors import ConfigError
from tba.policy.loading import load_policy
from tba.policy.reference import Reference
from tba.run.rollouts import RolloutLog, decode
from tiny_runs import tiny_config, train


def test_each_search_batch_is_sampled_at_its_own_temperature_and_scored_at_the_other(tmp_path):
    search = {"temperature": 1.0, "temperature_range": (0.7, 2.0)}
    train(tmp_path, tiny_config(tmp_path, search=search))
    run = tmp_path / "run"
    with RolloutLog(run / "rollouts.arrows") as log:
        found = [trajectory for batch in log.read() for trajectory in decode(batch)]
    temperatures = {t.ticket: t.temperature for t in found}
    assert len(set(temperatures.values())) == len(temperatures) > 2
    assert all(0.7 <= value <= 2.0 for value in temperatures.values())
    policy = load_policy(
        run / "model", ModelConfig(), device=torch.device("cpu"), dtype=torch.float32
    )

    def under_the_initial_model(trajectory, temperature):
        reference = Reference(policy.model, temperature=temperature)
        return reference.log_ref([trajectory.prompt_ids], [trajectory.tokens], np.array([0]))[0]

    for trajectory in [t for t in found if t.policy_version == 0][:6]:
        sampled = under_the_initial_model(trajectory, trajectory.temperature)
        np.testing.assert_allclose(trajectory.log_mu, sampled, atol=1e-4)
        np.testing.assert_allclose(
            trajectory.log_ref, under_the_initial_model(trajectory, 1.0), atol=1e-4
        )


def test_an_objective_with_a_ratio_is_refused(tmp_path):
    search = {"temperature_range": (0.7, 2.0)}
    with pytest.raises(ConfigError, match=r"objective\.kind = grpo asks for log_mu"):
        train(tmp_path, tiny_config(tmp_path, search=search, objective={"kind": "grpo"}))


def test_a_range_upside_down_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the first number must not be the larger"):
        tiny_config(tmp_path, search={"temperature_range": (2.0, 0.7)})
