"""Sections of the squared family name the settings of their functions."""

import pytest
from pydantic import ValidationError

from objectives.squared_batch import KINDS
from tba.config.objectives import squared
from tba.config.objectives.beta import LinearBeta
from tba.objectives.base import declared

SECTIONS = {
    section().kind: section
    for name, section in vars(squared).items()
    if name.endswith("Config") and name != "BetaConfig"
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_fields_are_the_settings_of_the_function(kind):
    (objective,) = {o for name, (o, _) in KINDS.items() if name.split()[0] == kind}
    fields = set(SECTIONS[kind].model_fields) - {"kind"}
    assert fields == set(declared(objective)[1])
    assert all(f.description for f in SECTIONS[kind].model_fields.values())


def test_every_function_has_a_section():
    assert {name.split()[0] for name in KINDS} == set(SECTIONS)


@pytest.mark.parametrize(("phi", "scale"), [("huber", -1.0), ("huber", 0.0), ("linex", 0.0)])
def test_a_scale_that_phi_cannot_take_is_refused(phi, scale):
    with pytest.raises(ValidationError, match="set a scale above 0"):
        squared.FTrajectoryBalanceConfig(phi=phi, scale=scale)
    assert squared.FTrajectoryBalanceConfig(phi="linex", scale=-2.0).scale == -2.0


def test_a_star_po_refuses_a_schedule_that_its_estimate_cannot_follow():
    with pytest.raises(ValidationError):
        squared.AStarPOConfig(beta=LinearBeta(start=1.0, end=0.1))
