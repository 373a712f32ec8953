"""Both estimates of log Z against the sum over a world of three responses."""

import math

import pytest
import torch

from factories import trajectory
from tba.run.rollouts import encode
from tba.staleness import reference_log_z, sample_measures

BETA = 0.5
SHARES, REWARDS = (1 / 2, 1 / 4, 1 / 4), (0.0, 1.0, 0.25)


def exact(weight: float) -> float:
    """log sum over y of ref(y)^weight exp(r / beta)."""
    return math.log(
        sum(p**weight * math.exp(r / BETA) for p, r in zip(SHARES, REWARDS, strict=True))
    )


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_log_z_of_the_posterior_itself_is_exact_whatever_the_reference_weighs(weight):
    reward = torch.tensor([REWARDS])  # [query, sample]
    log_ref = torch.tensor([SHARES]).log().unsqueeze(-1)  # [query, sample, token]
    log_pi = weight * log_ref + reward.unsqueeze(-1) / BETA - exact(weight)
    padded = [torch.nn.functional.pad(x, (0, 1), value=-9.0) for x in (log_pi, log_pi, log_ref)]
    mask = torch.tensor([[[True, False]] * 3])
    found = sample_measures(*padded, mask, reward, beta=BETA, reference_weight=weight)
    assert found["log_z"].item() == pytest.approx(exact(weight), abs=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_log_z_from_responses_as_often_as_the_reference_gives_them_is_exact(weight):
    found = [
        trajectory(3, (5 + y,), reward=REWARDS[y], log_ref=[math.log(SHARES[y])], ticket=0)
        for y in (0, 0, 1, 2)
    ]
    later = trajectory(3, (9,), reward=50.0, version=1)
    log_z = reference_log_z([encode([*found, later])], BETA, weight)
    assert log_z == {3: pytest.approx(exact(weight), abs=1e-6)}
