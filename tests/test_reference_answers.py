"""The reference's answers are kept for later evaluations, and read only when they are whole."""

import pytest

from tba.reference_answers import ReferenceAnswers
from tba.tasks.base import Answered


def answered(*texts):
    return Answered(queries=(), responses=(), texts=texts, scores=())


def test_the_answers_of_the_initial_model_are_those_of_later_comparisons(tmp_path):
    kept = ReferenceAnswers(tmp_path / "evaluations/reference.json")
    assert kept.compared_with(answered("a", "b"), 3) is None  # nothing was kept yet
    assert kept.compared_with(answered("a", "b"), 0) == ("a", "b")
    assert kept.compared_with(answered("c", "d"), 3) == ["a", "b"]
    assert kept.compared_with(answered("c"), 3) is None  # of other queries


@pytest.mark.parametrize("content", ["", "[", "{}", "[1, 2]", '["a", null]'])
def test_damaged_answers_are_as_none(tmp_path, content):
    file = tmp_path / "reference.json"
    file.write_text(content)
    assert ReferenceAnswers(file).compared_with(answered("c", "d"), 3) is None
