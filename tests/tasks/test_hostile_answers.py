"""What completions written to hang a grader cost: at most their time bound each."""

import time

import numpy as np
import pytest

from tba.records import Outcome, Query
from tba.tasks import RewardSpec, Scorer
from tba.tasks.rewards import BUILT_IN

TIMEOUT_S = 3.0
START_S = 30.0
"""Generous: what starting a child again may take on a busy machine."""

LONG = {
    "megabytes of digits": "9" * 4_000_000,
    "megabytes of digits in a box": "\\boxed{" + "9" * 4_000_000 + "}",
    "megabytes of thousands": "#### " + "999," * 1_000_000,
    "megabytes of open boxes": "\\boxed{" * 500_000,
    "megabytes of closed boxes": "\\boxed{" * 300_000 + "1" + "}" * 300_000,
    "megabytes of braces": "{" * 2_000_000 + "}" * 2_000_000,
    "megabytes of dollars": "$" * 3_000_001,
    "megabytes of formula starts": "\\(" * 1_000_000,
    "megabytes of phrases": "answer is " * 300_000,
    "megabytes of spaces": "the answer" + " " * 4_000_000 + "is",
    "megabytes of minus signs": "-" * 4_000_000,
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 5_000 + "2" + "}" * 5_001,
}

SHORT = {
    "fractions nested deep": "\\frac{1}{1+" * 24 + "2" + "}" * 24,
    "brackets": "(" * 150 + "1" + ")" * 150,
    "sets of sets": "\\{" * 70 + "1" + "\\}" * 70,
    "a list of lists": "(" + "(1,2)," * 45 + "3)",
    "alternatives": "1 \\pm 2" + " \\pm 2" * 40,
    "many digits": "9" * 290,
    "a long fraction": "1" * 140 + "/" + "7" * 140,
    "powers of powers": "9^{9^{9^{9}}}",
    "powers in a row": "9^9^9^9^9",
    "a large power": "3^{100000000}",
    "a huge exponent": "10^{10^{10}}",
    "a factorial": "2000000!",
    "factorials": "9!!!!!",
    "a double factorial of a power": "(10^{9})!",
    "a binomial": "\\binom{1000000000}{500000000}",
    "a sum": "\\sum_{i=1}^{1000000000} \\frac{1}{i^i}",
    "a product": "\\prod_{k=1}^{100000000} (1+\\frac{1}{k})",
    "an integral": "\\int_0^1 \\frac{\\sin(x^x)}{1+x^{x^x}} dx",
    "a limit": "\\lim_{x \\to 0} (\\sin(x)^{x^x})^{\\tan(x)^{x}}",
    "a polynomial": "(a+b+c+d+f)^{400}",
    "nested roots": "\\sqrt{2+" * 11 + "x" + "}" * 11,
    "an equation": "x^{97}+x^{89}+\\sin(x)=e^{x^2}",
    "a logarithm": "\\log_{2}(2^{2^{2^{2^{2^{2}}}}})",
    "a matrix power": "\\begin{pmatrix}1&x\\\\y&1\\end{pmatrix}^{5000}",
    "an interval": "[9^{9^{9^9}}, 10^{10^{10^{10}}}]",
    "code": "__import__('time').sleep(99)",
}
SHORT_GOLDS = ("5", "x^2+1", "[1,2]", "x = 5")


def query(number, gold):
    return Query(number, "?", np.ones(1, np.int32), {"prompt": "?", "answer": gold})


def scored(scorer, text, gold):
    start = time.monotonic()
    (score,) = scorer.score([query(0, gold)], [text], [np.zeros(1, np.int32)])
    return score, time.monotonic() - start


def test_long_completions_are_graded_at_once_and_wrong():
    with Scorer(RewardSpec((BUILT_IN["math"],), (1.0,), START_S)) as scorer:
        scored(scorer, r"\boxed{x}", "x+1")  # math-verify has built its parser
        for name, text in LONG.items():
            score, took = scored(scorer, text, "5")
            assert (name, score.outcome, score.reward) == (name, Outcome.OK, 0.0)
            assert took < START_S, name


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gold", SHORT_GOLDS)
def test_hostile_answers_cost_at_most_their_time_bound(gold):
    with Scorer(RewardSpec((BUILT_IN["math"],), (1.0,), TIMEOUT_S)) as scorer:
        for name, text in SHORT.items():
            score, took = scored(scorer, f"\\boxed{{{text}}}", gold)
            assert took < TIMEOUT_S + START_S, name
            assert score.outcome in (Outcome.OK, Outcome.TIMEOUT, Outcome.ERROR), name
            assert score.outcome is not Outcome.OK or score.reward == 0.0, name
            assert scored(scorer, r"\boxed{\frac{10}{2}}", "5")[0].reward == 1.0, name
