"""Graders accept their gold answers and refuse a listed set of wrong ones."""

from decimal import Decimal

import pytest

from tba.references import load_function
from tba.tasks.rewards import (
    BUILT_IN,
    arithmetic,
    exact_match,
    find_final_answer,
    find_last_number,
    gsm8k,
    last_number,
)

RIGHT_SUM = [
    "53",
    " 53",
    "53\n",
    "53.",
    "53.0",
    "47 + 6 = 53",
    "47+6=53.",
    "The answer is 53",
    "The answer is 53.",
    "47 + 6 = 53. That is all!",
    "If you add 6 to 47 you get **53**.",
    "It is $53$.",
    "So \\boxed{53}",
    "First 47 + 3 = 50, then 50 + 3 = 53.",
]

WRONG_SUM = [
    "",
    "fifty-three",
    "52",
    "-53",
    "530",
    "5 3",
    "5+3",
    "5.3",
    "0.53",
    ".53",
    "053",
    "5,3",
    "53,00",
    "53 53",
    "1=53",
    "=53",
    "47 + 6",
    "47 + 5 = 53",
    "46 + 6 = 52",
    "53 + 0",
    "0 + 53",
    "0+53",
    "1*53",
    "53/1",
    "The answer is 0 + 53",
    "The answer is 5**53",
    "The answer is - 53",
    "The answer is -53.",
    "The answer is \N{MINUS SIGN}53.",
    "The answer is \N{EN DASH}53.",
    "The answer is 100 -53",
    "The answer is 100-53",
    "The answer is x53",
    "The answer is 1e53",
    "The answer is 5.3.0",
    "The answer is 53.5",
    "The answer is 53 or 54",
    "The answer is 53 since 47 + 6 = 54",
]


def graded(text, a=47, op="+", b=6, answer="53"):
    return arithmetic([text], answer=[answer], a=[a], op=[op], b=[b])


@pytest.mark.parametrize("text", RIGHT_SUM)
def test_arithmetic_accepts(text):
    assert graded(text) == [1.0]


@pytest.mark.parametrize("text", WRONG_SUM)
def test_arithmetic_refuses(text):
    assert graded(text) == [0.0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("-3", 1.0),
        ("3 - 6 = -3", 1.0),
        ("3-6=-3", 1.0),
        ("3 - 6 = \N{MINUS SIGN}3", 1.0),
        ("The answer is -3.", 1.0),
        ("3", 0.0),
        ("- 3", 0.0),
        ("--3", 0.0),
        ("3-6", 0.0),
        ("The answer is 3 - 6", 0.0),
        ("The answer is 0-3", 0.0),
    ],
)
def test_arithmetic_grades_negative_answers(text, reward):
    assert graded(text, 3, "-", 6, "-3") == [reward]


def test_arithmetic_accepts_thousands_and_times_signs():
    texts = ["40 \N{MULTIPLICATION SIGN} 40 = 1,600", "1600", "It is 1,600.00", "16,00", "1,6000"]
    n = len(texts)
    rewards = arithmetic(texts, answer=["1600"] * n, a=[40] * n, op=["*"] * n, b=[40] * n)
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text", ["579", " 579 ", "5+79", "57", "5799", "500+79=579", "+579", "579="]
)
def test_character_model_is_held_to_the_bare_number(text):
    accepted = {"579", " 579 ", "500+79=579"}
    assert graded(text, 500, "+", 79, "579") == [float(text in accepted)]


def test_last_number_is_the_last_one_written():
    assert find_last_number("from 3 to 4,000.50 dollars.") == Decimal("4000.5")
    assert find_last_number("no number") is None
    assert last_number(["1 2", "2 1"], answer=[2, "2"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so #### 72", 72),
        ("#### 1,234", 1234),
        ("#### $1,234.50.", Decimal("1234.5")),
        ("####-7", -7),
        ("#### 72.0", 72),
        ("#### 72 clips, not 73", None),
        ("#### 1\nNo: #### 2", 2),
        ("Thus 9", 9),
        ("It costs $1,000.", 1000),
        ("9 ####", None),
        ("#### none", None),
        ("none", None),
    ],
)
def test_final_answer_follows_the_last_mark(text, value):
    assert find_final_answer(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "#### 72 + 5",
            "#### 72 or 73",
            "#### not 72",
            "#### 72e3",
            "#### 72 * 1000",
            "#### 72^2",
        ),
        "#### I do not know.\n\nProblem: 72 apples",
        *("#### 72 thousand", "2^72", "= 8 x 72", "= 8 times 72", "8\N{DIVISION SIGN}72"),
        *("sqrt(72)", "log 72", "It is 72 million"),
        *("72k", "$72K.", "72M", "It is 72B", "#### 72k", "#### $72M", "#### 72 k", "#### 72bn"),
        *("#### 72 thousands", "72 dozens", "72 trillion", "72 halves", "#### 72-thousand"),
        *("#### 72!", "#### 72/", "#### 72 minus", "#### 72 -", "#### 72 +", "#### 72 point five"),
        *("#### 72 times two", "#### 72 or so", "#### 72 is wrong", "#### it isn't 72"),
        *("#### ++72", "#### 5 +72", "#### + 72", "#### +-72"),
    ],
)
def test_gsm8k_refuses_a_number_that_is_not_the_result(text):
    assert gsm8k([text], answer=["#### 72"]) == [0.0]


@pytest.mark.parametrize(
    "text",
    [
        "#### 72 apples",
        "#### $72.00",
        "####\n72",
        "#### 72\nProblem: 5",
        *("#### +72", "####+72", "#### +$72", "#### **+72**", "#### $72$", "#### 72%"),
        *(
            "#### 72 more apples",
            "#### 72 times",
            "#### 72 miles/hour",
            "#### 72 kg",
            "72m",
            "72km",
        ),
        *("#### 72 Bananas", "It is 72!", "#### 72.", "#### 72 (apples)", "#### 72 orders"),
        "8 * 9 = 72 apples",
        "x = 72",
    ],
)
def test_gsm8k_accepts_the_result_with_words(text):
    assert gsm8k([text], answer=["#### 72"]) == [1.0]


def test_gsm8k_compares_values():
    solution = "48/2 = <<48/2=24>>24\n#### 1,072"
    texts = [
        "#### 1072",
        "The answer is 1072.00",
        "$1,072.",
        "#### 1073",
        "1072 #### 3",
        "",
        "####",
    ]
    assert gsm8k(texts, answer=[solution] * 7) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_exact_match_ignores_surrounding_space_only():
    assert exact_match([" yes\n", "Yes", "yes."], answer=["yes"] * 3) == [1.0, 0.0, 0.0]


def test_message_completions_are_graded_like_text():
    completion = [{"role": "assistant", "content": "It is 4."}]
    assert last_number([completion], answer=["4"]) == [1.0]


def test_hostile_text_takes_linear_time():
    texts = [
        "9" * 200_000,
        "9," * 100_000,
        "9.9" * 100_000,
        "-" * 200_000,
        "9^9^9^9",
        "**" * 99_999,
        "2" + " " * 200_000,
        "#### 2" + " " * 200_000,
    ]
    assert last_number(texts, answer=["1"] * 8) == [0.0] * 8
    assert gsm8k(texts, answer=["1"] * 8) == [0.0] * 8


def test_short_names_lead_to_functions():
    assert {load_function(reference).__name__ for reference in BUILT_IN.values()} == set(BUILT_IN)
