"""Settings that all tests share."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tba.config import BuildConfig, ModelConfig
from tba.policy.build import build_policy
from tba.policy.loading import Policy, load_policy

# A loaded machine is slow, which says nothing about the property under test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """A two-layer Llama with random weights and a character tokenizer."""
    build = BuildConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    build_policy(build, tmp_path, seed=1)
    return load_policy(
        tmp_path, ModelConfig(build=build), device=torch.device("cpu"), dtype=torch.float32
    )
