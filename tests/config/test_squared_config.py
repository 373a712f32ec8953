"""What sections of the squared family refuse."""

import pytest
from pydantic import ValidationError

from tba.config.objectives import squared
from tba.config.objectives.beta import LinearBeta


@pytest.mark.parametrize(("phi", "scale"), [("huber", -1.0), ("huber", 0.0), ("linex", 0.0)])
def test_a_scale_that_phi_cannot_take_is_refused(phi, scale):
    with pytest.raises(ValidationError, match="set a scale above 0"):
        squared.FTrajectoryBalanceConfig(phi=phi, scale=scale)
    assert squared.FTrajectoryBalanceConfig(phi="linex", scale=-2.0).scale == -2.0


def test_a_star_po_refuses_a_schedule_that_its_estimate_cannot_follow():
    with pytest.raises(ValidationError):
        squared.AStarPOConfig(beta=LinearBeta(start=1.0, end=0.1))
