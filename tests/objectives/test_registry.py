"""Every kind: its section, its inputs and its settings fit together."""

from typing import get_args

import pytest

from tba.config.objectives import ObjectiveConfig, section_of
from tba.objectives import INPUTS, OBJECTIVES, load_objective
from tba.objectives.base import check_inputs, declared

OF_SEARCHERS = {
    "vineppo": {"rollouts_per_prefix", "step_separator"},
    "a_star_po": {"reference_samples"},
}
"""Settings that annotators read, not the loss."""


def test_every_kind_of_the_configuration_is_registered_and_the_other_way_round():
    sections = get_args(get_args(ObjectiveConfig)[0])
    kinds = {section.model_fields["kind"].default for section in sections}
    assert kinds == {*OBJECTIVES, "custom"}
    assert len(kinds) == len(sections)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_settings_are_the_fields_of_the_section_and_inputs_exist(kind):
    objective = OBJECTIVES[kind]
    check_inputs(objective, kind)
    settings = set(declared(objective.loss)[1])
    if objective.prepare is not None:
        settings |= set(declared(objective.prepare)[1])
    fields = set(section_of(kind).model_fields) - {"kind"}
    assert fields == settings | OF_SEARCHERS.get(kind, set())
    assert "log_pi" in objective.inputs()
    assert set(objective.inputs()) <= set(INPUTS)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_section_of_defaults_loads_its_objective(kind):
    assert load_objective(section_of(kind)()) is OBJECTIVES[kind]
