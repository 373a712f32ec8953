"""The reward `math`: gold solutions, equal forms and wrong answers."""

import itertools
import json
import re

import pytest

from data_sets import find_data
from tba.tasks.final_answer import find_answer, find_box
from tba.tasks.grading import is_same_answer, math

EQUAL = [
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".50"),
    (r"\frac{1}{2}", r"50\%"),
    ("25", r"25\%"),
    (r"25\%", "25"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"-\frac{3}{4}", "\N{MINUS SIGN}3/4"),
    (r"1\frac{4}{5}", r"\frac{9}{5}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"3\sqrt{2}", r"\sqrt{18}"),
    (r"3\sqrt{13}", r"3 \sqrt {13}"),
    ("10,000", "10000"),
    (r"10,\!000", r"10{,}000.00"),
    ("1000000", "1,000,000"),
    ("90^\\circ", "90"),
    ("90", "90^{\\circ}"),
    ("90", r"90\text{ degrees}"),
    (r"5\text{ inches}", "5"),
    ("5", "5 inches"),
    ("5", r"5\,\text{in}"),
    (r"18\text{ ways.}", "18"),
    (r"\$32,\!348", "32348"),
    ("6.75", r"\$6.75"),
    (r"12\text{ square units}", "12"),
    (r"440\text{ cm}^2", "440"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{even}", "Even"),
    (r"\text{(C)}", "C"),
    ("D", r"\textbf{(D)}"),
    ("5", "x = 5"),
    ("x = 5", "5"),
    ("5", "2 + 3 = 5"),
    ("11", r"f(2) = 4 + 7 = 11"),
    ("1, 2", "2, 1"),
    ("1,-2", r"\{-2, 1\}"),
    ("1,2", r"1 \text{ and } 2"),
    (r"3 \pm 2\sqrt{2}", r"3 - 2\sqrt{2}, 3 + 2\sqrt{2}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    (r"(-\infty,2)\cup(2,\infty)", r"(2, \infty) \cup (-\infty, 2)"),
    (r"x \in [-2,7]", "[-2, 7]"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x + 11", "11+x"),
    ("y = 2x + 3", "y=3+2x"),
    ("3+4i", "4i + 3"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{bmatrix}1\\-2\end{bmatrix}"),
    ("2516_8", "2516_{8}"),
    ("2516_8", "2516"),
    (r"\log_2 8", "3"),
    (r"9.6 \cdot 10^3", "9600"),
    ("5000", "5 thousand"),
    ("0.05", "5 percent"),
    ("2.5", "2 1/2"),
    ("-2.5", "-2 1/2"),
    ("10000", r"10\ 000"),
    ("1000", "x=1,000"),
    ("(3,4)", "(x,y)=(3,4)"),
    (r"(3,\infty)", "x>3"),
    ("(-1,1)", "-1<x<1"),
    ("[1,2]", r"1\le x\le2"),
    ("5", r"\boldsymbol{5}"),
    ("5", r"{\bf 5}"),
    ("5", r"\textcolor{red}{5}"),
    (r"\text{(C)}", r"(C)\ 5"),
    ("5", r"\angle A = 5"),
    ("5", "[ABC] = 5"),
    ("5", "AB = 5"),
    ("5", "f(2) = 2+3 = 5"),
    ("x+1", r"f(x) = \frac{2x+2}{2} = x+1"),
    ("1,2", "x = 1, x = 2"),
    (r"\frac12", "(0.5)"),
    (r"\frac12", "0.25+0.25"),
    (r"\frac{3\pi}{2}", r"1.5\pi"),
    ("5 million", "5,000,000"),
    ("x=2", "2"),
    ("EVEN", "even"),
    ("1000.5", "1 000.5"),
    (r"\frac{1}{2}", r"\sin A = \frac12"),
    ("5", r"5\text{ km/h}"),
    ("5", r"5 \text{ sq. ft}"),
    ("10, 100", "100, 10"),
    ("2, 100", "100, 2"),
    ("1, 234, 567", "567, 234, 1"),
    (r"\{3,125\}", r"\{125,3\}"),
    (r"\left\{3,125\right\}", r"\lbrace 125,3\rbrace"),
    (r"3,\,125", "125, 3"),
    ("70,110", "110,70"),
    ("70,110", r"70 \text{ and } 110"),
    ("3 and 125", "125, 3"),
    ("1,000, 2,000", "2000, 1000"),
    ("1200", "1,200"),
    ("1200", r"(1{,}200)"),
    (r"(1,\!200, 3)", "(1200,3)"),
    (r"1,\!000,\!000", "1000000"),
    (r"11,\! 111,\! 100", "11111100"),
    ("10000", r"10,\,000"),
    ("10000", r"10\,000"),
    (r"\frac{1000}{3}", r"\frac{1,000}{3}"),
    (r"\frac{1000}{3}", r"\dfrac {1,000}{3}"),
    ("1200", r"{\bf 1,200}"),
    ("1200", r"\boldsymbol{1,200}"),
    ("1200", r"x = 1,200\text{ ways}"),
    (r"[-36,104]", r"-36 \le k \le 104"),
    *(("3000000000000", words) for words in ("3 trillion", r"3\text{ million million}")),
    *(("3000", words) for words in ("3 thousands", "3 Thousand", "30 hundreds of people")),
    ("36", "3 dozens"),
    *(("0.03", words) for words in ("3 percent", "3 per cent of them", r"3\text{ percent}")),
    *(("3", words) for words in ("3 percent", "3 quarters", "3 children tickets", "3 ways.")),
    ("3", "3 L"),
    ("3", "3 kph"),
    ("3 mph", r"3 \text{ miles per hour}"),
    ("3 mph", "3 mi/h"),
    (r"3\text{ km/h}", "3 kmh"),
    (r"3\text{ km/h}", r"3\text{ km} / \text{h}"),
    ("3 lb", "3 pounds"),
    (r"3\text{ liters}", "3 L"),
    ("18", r"18\text{ positive integers}"),
    ("1", "1 point"),
    ("3000000", r"\$3 million"),
    ("3", r"\$3 per hour"),
    (r"\$3", "3 dollars"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"0.1\overline{6}", "1/6"),
    (r"-2.\overline{142857}", r"-\frac{15}{7}"),
    (r".\overline{9}", "1"),
    ("1000", "1e3"),
    ("0.025", "2.5e-2"),
    (r"[2,\infty)", r"2 \le x"),
    (r"(-\infty,2)", "2 > x"),
    (r"(-\infty,2)", "x < 2"),
    ("(1,2)", "2 > x > 1"),
    ("(1,2]", r"2 \ge x > 1"),
    (r"3\text{ pounds}", r"3\text{ lbs}"),
]

DIFFERENT = [
    ("5", "-5"),
    ("5", "15"),
    ("5", "5.0001"),
    ("5", "5, 6"),
    ("5", "2 + 2 = 5"),
    ("5", "5 = 6"),
    ("5", "x = 5 = 4"),
    ("5", "5 + 1"),
    ("5", "5x"),
    ("5", "x > 5"),
    ("5", r"x \neq 5"),
    ("5", r"5 \text{ or } 6"),
    ("5", "not 5"),
    ("x = 5", "y = 5"),
    (r"\frac{1}{3}", "0.333"),
    (r"\frac{1}{3}", "0.333333333333"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\pi", "3.14159265"),
    (r"\pi", r"\frac{22}{7}"),
    (r"\frac{1}{2}", r"5\%"),
    (r"\frac{3}{4}", r"\frac{4}{3}"),
    ("10,000", "1,000"),
    (r"5\text{ cm}", "5 m"),
    (r"5\text{ cm}", r"5\text{ cm}^2"),
    (r"9\text{ a.m.}", r"9\text{ p.m.}"),
    (r"90^\circ", r"90\text{ radians}"),
    ("2516_8", "2516_7"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2]"),
    ("(1,2)", "1,2"),
    ("(1,2)", "(1,2,3)"),
    ("(1,2)", r"\{1,2\}"),
    (r"(-\infty,2)\cup(2,\infty)", r"(-\infty,2]\cup(2,\infty)"),
    (r"(-\infty,2)\cup(2,\infty)", r"(-\infty,2)"),
    ("1, 2", "1, 2, 3"),
    ("1, 2", "1, 1"),
    (r"3 \pm \sqrt{2}", r"3 + \sqrt{2}"),
    ("x^2+2x+1", "x^2+2x"),
    ("x^2+2x+1", "y^2+2y+1"),
    ("y = 2x + 3", "y = 2x - 3"),
    ("3+4i", "3-4i"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix} -2 \\ 1 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 1 & -2 \end{pmatrix}"),
    (r"\text{even}", "odd"),
    (r"\text{(C)}", "D"),
    ("4:3", "3:4"),
    ("5", "five"),
    ("0", ""),
    ("0", r"\frac{1}{0}"),
    ("5", "2x=5"),
    ("5", "-x=5"),
    ("5", "x+1=5"),
    ("5", r"\frac{x}{2}=5"),
    ("5", "1<x=5"),
    ("5", r"x\ne y=5"),
    ("4", "x^2=4"),
    ("21/2", "2 1/2"),
    ("101/2", "10 1/2"),
    ("56", r"5\ 6"),
    ("12", "1~2"),
    (r"\pi", "+3.1415927"),
    (r"\pi", "(3.1415927)"),
    (r"\pi", "{3.1415927}"),
    (r"\pi", "-(-3.1415927)"),
    (r"\sqrt2", "+1.4142136"),
    (r"\sqrt2", "1.4142135623730951 + 0"),
    ("5", "5 million"),
    ("5", r"5 \text{ thousand}"),
    ("5", "5 dozen"),
    ("5", "5 squared"),
    ("5", "5 factorial"),
    ("5", "5 pi"),
    ("5", r"5 \text{or 7}"),
    ("5", r"5 \text{ or 6}}"),
    ("5", r"5 \text{ not}"),
    ("5", r"5 \text{ plus six}"),
    (r"2 \text{ thousand}", r"2 \text{ million}"),
    ("12", "12_{3}"),
    ("even", "neve"),
    ("seat", "east"),
    ("on", "no"),
    ("N", "n"),
    ("A", "a"),
    ("a", "(A)"),
    ("ab", "AB"),
    ("5", "x != 5"),
    ("5", "x >= 5"),
    ("5", "y = x = 6"),
    (r"(3,\infty)", "x<3"),
    ("(-1,1)", r"-1 \le x < 1"),
    ("(1,2)", "x>1"),
    ("(-1,1)", "-1<x>1"),
    ("3, 125", "3125"),
    ("3125", "3, 125"),
    ("3125", "3 and 125"),
    ("1200", "(1,200)"),
    ("1,200", "(1,200)"),
    ("1000", "(1,000)"),
    ("1200", r"\{1,200\}"),
    ("1,000", "1,0"),
    ("(1,200)", "(200,1)"),
    ("1,234,567", "1234, 567"),
    *(
        ("3", f"3 {words}")
        for words in (
            *("trillion", "thousands", "millions", "hundreds", "dozens", "thousand million"),
            *("thirds", "halves", "tenths", "fifths", "hundredths", "third", "eighths"),
            *("negative", "below zero", "point five", "divided by two", "doubled", "less"),
            *("is wrong", "isn't it", "M", "K", "k", "B", "bn", "times two", "x/y"),
            *(r"\text{ M}", r"\text{ trillion}", r"\text{ halves}", r"\text{ below zero}"),
        )
    ),
    *(("5", letters) for letters in ("5M", "5K", "5k", "5B", "5T", "5 MM")),
    ("300", "3 hundred thousand"),
    ("3", "3% less"),
    ("3", r"\$3 million"),
    ("3", r"\$3 trillion"),
    (r"\frac{1}{3}", r"0.\overline{33}4"),
    ("0.3", r"0.\overline{3}"),
    (r"0.1\overline{6}", r"0.\overline{16}"),
    ("1000", "1e4"),
    ("1", "1e99"),
    (r"[2,\infty)", "2 < x"),
    (r"(-\infty,2)", r"2 \ge x"),
    ("(1,2)", "1 > x > 2"),
    ("(1,2]", r"2 > x \ge 1"),
    ("(1,2)", r"2 > x < 1"),
    ("3 lb", "3 kg"),
    ("3 pounds", r"3\text{ kilograms}"),
    ("3 ml", "3 liters"),
    ("3 mL", "3 L"),
    ("3 gallons", "3 liters"),
    ("3 Hz", "3 kHz"),
    ("3 mph", "3 kph"),
    *((r"3\text{ mph}", unit) for unit in ("3 kmh", "3 km/h", r"3\text{ km/h}", "3 m/s")),
    (r"3\text{ miles per hour}", r"3\text{ kilometers per hour}"),
]

FOUND = [
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{1} no, \boxed{\boxed{2}}", "2"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
    (r"$\boxed 5$ is it", "5"),
    (r"the answer is 3, \fbox{4}", "4"),
    (r"\boxed{5", None),
    (r"\boxed{1} and \boxed{5", None),
    (r"\boxed{}", None),
    ("#### 5\nBye 6", "5"),
    ("#### $x+1$", "x+1"),
    (r"The answer is $\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
    ("The answer is $5", "$5"),
    ("The answer is 4. No, the answer is 1.5.", "1.5"),
    ("**Answer:** $x = 2$\nDone 3", "x = 2"),
    ("**Final answer**: 12 cm", "12 cm"),
    ("The answer is:\n\n(1, 2)", "(1, 2)"),
    ("It is $2$, so it is $3$.", "3"),
    (r"It is \(2\), so it is \[x^3\]", "x^3"),
    ("It is $2$, so it is 4.", "4"),
    ("It is 5 + 3", None),
    ("nothing", None),
    ("", None),
    ("9" * 301, None),
]


@pytest.mark.parametrize(("text", "answer"), FOUND)
def test_the_final_answer_is_what_the_strongest_mark_marks(text, answer):
    assert find_answer(text) == answer


@pytest.mark.parametrize(("gold", "found"), EQUAL)
def test_equal_forms_are_accepted(gold, found):
    assert math([f"Therefore \\boxed{{{found}}}."], answer=[gold]) == [1.0]


@pytest.mark.parametrize(("gold", "found"), DIFFERENT)
def test_wrong_answers_are_refused(gold, found):
    assert math([f"Therefore \\boxed{{{found}}}."], answer=[gold]) == [0.0]


def test_what_is_said_beside_the_answer_earns_nothing():
    texts = [
        r"The answer is 5. \boxed{6}",
        r"5 5 5 \boxed{}",
        "5, 6, 7 or #### 6",
        "It is $5$ or $6$",
        "",
    ]
    assert math(texts, answer=["5"] * 5) == [0.0] * 5


def test_answers_that_are_numbers_and_chats_are_graded():
    chat = [{"role": "assistant", "content": r"\boxed{0.5}"}]
    assert math([chat], answer=[0.5]) == [1.0]


def solutions(name):
    data = find_data()
    if data is None:
        pytest.skip("MATH is not at hand: set TBA_DATA to the folder that holds math/")
    return [json.loads(line) for line in (data / f"math/{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "count"), [("math500_test", 500), ("math_test_5000", 5000)])
def test_every_gold_answer_of_math_is_found_in_its_own_solution(name, count):
    rows = solutions(name)
    golds = [row.get("answer") or find_box(row["solution"]) for row in rows]
    assert len(golds) == count
    assert math([row["solution"] for row in rows], answer=golds) == [1.0] * count


def test_no_solution_of_math_is_graded_right_for_another_answer():
    texts = [row["solution"] for row in solutions("math500_test")]
    assert math(texts, answer=["17/19"] * 500) == [0.0] * 500


def test_every_gold_answer_of_math_is_accepted_in_another_spelling():
    golds = [find_box(row["solution"]) for row in solutions("math_test_5000")]
    written = [f"The final answer is ${respell(gold)}$." for gold in golds]
    refused = [g for g, r in zip(golds, math(written, answer=golds), strict=True) if r != 1.0]
    assert refused == []


@pytest.mark.slow
def test_no_gold_answer_of_math_is_accepted_for_another_problem():
    golds = [find_box(row["solution"]) for row in solutions("math_test_5000")]
    pairs = itertools.pairwise(golds)
    accepted = {(a, b) for a, b in pairs if is_same_answer(a, b) and bare(a) != bare(b)}
    assert accepted == set()


def respell(gold):
    """Write it with other spaces, other fractions and sized brackets."""
    gold = (
        " ".join(gold.split())
        .replace("\\frac", "\\dfrac ")
        .replace("(", "\\left( ")
        .replace(")", " \\right)")
    )
    return gold.replace("+", " + ").replace(",\\!", "{,}").replace("\\text{", "\\mathrm{")


def bare(gold):
    """Leave out what `5`, `5^\\circ`, `x = 5` and `5\\text{ hours}` may differ by."""
    gold = re.sub(r"\\text\{[^{}]*\}|\^\{?\\circ\}?|^[a-z] ?= ?|\\[$%!,]|\s", "", gold)
    return re.sub(r"\\[dt]?frac(\d)(\d)", r"\\frac{\1}{\2}", gold)
