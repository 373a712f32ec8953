"""Win rates by hand-made judges, and how varied answers are."""

import math

import numpy as np
import pytest

from tba.errors import AllExcludedError, UserCodeError
from tba.records import FinishReason, Outcome, Query, Response, Score
from tba.tasks.base import Answered, RewardSpec
from tba.tasks.comparison import JUDGED_AT_A_TIME, Comparison, distinct, win_rate

JUDGE = """
def number(prompts, completions, **columns):
    if any(c == "raise" for c in completions):
        raise ValueError("cannot judge this")
    return [None if c == "none" else float(c) + 10 * float(p) for p, c in zip(prompts, completions)]

def counted(completions, calls, **columns):
    with open(calls[0], "a") as file:
        file.write(f"{len(completions)}\\n")
    return [0.0] * len(completions)
"""


@pytest.fixture
def judge(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(JUDGE)
    return lambda name: RewardSpec((f"{path}:{name}",), (1.0,), 30.0)


def answered(texts, queries=None, reference=None, **columns):
    """Return answers to the given queries; those to query n have n for their prompt."""
    asked = range(len(texts)) if queries is None else queries
    one = np.zeros(1, dtype=np.int32)
    responses = [
        Response(np.zeros(i + 1, np.int32), np.zeros(i + 1, np.float32), FinishReason.STOP)
        for i in range(len(texts))
    ]
    return Answered(
        queries=[Query(n, str(n), one, {"prompt": str(n), **columns}) for n in asked],
        responses=responses,
        texts=texts,
        scores=[Score(Outcome.OK, 0.0)] * len(texts),
        reference_texts=reference,
    )


def test_win_rates_count_ties_half(judge):
    measure = Comparison(judge("number"), given=["1", "1", "1", "1"])
    found = measure(answered(["2", "1", "0", "3"], reference=["2", "2", "2", "3"]))
    # against what is given: won, tie, lost, won; against the reference: tie, lost, lost, tie
    assert found["win_rate_given"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)
    assert found["win_rate_reference"] == pytest.approx((0.5 + 0 + 0 + 0.5) / 4)
    # mean of the scores 2 + 0, 1 + 10, 0 + 20, 3 + 30
    assert found["gold_reward"] == pytest.approx((2 + 11 + 20 + 33) / 4)
    assert found["length"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert found["judge_excluded"] == 0


@pytest.mark.parametrize("failure", ["raise", "none"])
def test_failures_of_the_judge_are_counted_and_no_losses(judge, failure):
    measure = Comparison(judge("number"), given=["1", failure, "1", "1"])
    found = measure(answered([failure, "5", "5", "0"], reference=["0", "0", failure, "1"]))
    assert found["win_rate_given"] == 0.5  # queries 2 and 3: won and lost
    assert found["win_rate_reference"] == 0.5  # queries 1 and 3: won and lost
    assert found["gold_reward"] == pytest.approx((15 + 25 + 30) / 3)
    assert found["judge_excluded"] == 3  # queries 0, 1 and 2, each out of one comparison


def test_several_answers_to_a_query_are_compared_with_the_one_given(judge):
    measure = Comparison(judge("number"), given=["1", None, "3"])
    found = measure(answered(["0", "2", "9", "9", "3", "4"], queries=[0, 0, 1, 1, 2, 2]))
    assert found["win_rate_given"] == pytest.approx((0 + 1 + 0.5 + 1) / 4)
    assert "win_rate_reference" not in found
    assert found["judge_excluded"] == 0  # a query without a given answer is no failure


def test_given_answers_are_judged_once_and_all_in_bounded_batches(judge, tmp_path):
    calls = tmp_path / "calls"
    measure = Comparison(judge("counted"), given=["1", "1"])
    several = answered(["2"] * 130, queries=[0] * 65 + [1] * 65, calls=str(calls))
    assert measure(several)["win_rate_given"] == 0.5
    sizes = list(map(int, calls.read_text().split()))
    assert sizes == [JUDGED_AT_A_TIME, JUDGED_AT_A_TIME, 2, 2]


def test_without_given_answers_and_reference_there_is_no_win_rate(judge):
    found = Comparison(judge("number"), given=[None])(answered(["4"]))
    assert set(found) == {"length", "distinct_1", "gold_reward", "judge_excluded"}


def test_without_a_judge_length_and_variety_are_told():
    found = Comparison(None, given=["x"])(answered(["one two two"], reference=["x"]))
    assert found == {"length": 1.0, "distinct_1": pytest.approx(2 / 3), "distinct_2": 1.0}


def test_a_judge_that_fails_on_everything_ends_the_evaluation(judge):
    measure = Comparison(judge("number"), given=["1"])
    with pytest.raises(AllExcludedError, match=r"could be judged .*ValueError: cannot judge this"):
        measure(answered(["raise"]))


def test_a_win_rate_needs_a_comparison():
    with pytest.raises(AllExcludedError, match="a win rate cannot be told"):
        win_rate(np.array([math.nan, 1.0]), np.array([1.0, math.nan]))


def test_a_judge_that_cannot_be_imported_is_refused(tmp_path):
    spec = RewardSpec((f"{tmp_path}/gone.py:judge",), (1.0,), 5.0)
    with pytest.raises(UserCodeError, match=r"gone\.py does not exist"):
        Comparison(spec, given=["1"])(answered(["1"]))


def test_distinct_n_counts_different_sequences_of_words_in_all_answers():
    texts = ["a b a b", "a  b\nc", "c"]
    # words: a b a b a b c c, three different of eight; pairs: ab ba ab ab bc, three of five
    assert distinct(texts, 1) == pytest.approx(3 / 8)
    assert distinct(texts, 2) == pytest.approx(3 / 5)
    assert distinct(texts, 5) is None
    assert distinct([""], 1) is None
