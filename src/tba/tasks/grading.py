r"""Says whether a response's final answer is a problem's, as mathematics: the reward `math`.

`tba.tasks.final_answer` finds the final answer; everything else that the response says is ignored.
Two answers are the same when, in this order,

1. their texts are, after spacing and spelling of LaTeX (`\dfrac12`, `\left(`, `10{,}000`);
2. both are numbers of the same exact value (`0.5`, `1/2`, `\frac12`, `50\%`, `1,000`); two numbers
   of different value differ, so `0.333` is not `1/3`;
3. both are lists, tuples, intervals, sets or unions of the same kind with the same elements: in
   order for `(...)` and `[...]`, in any order without brackets, for `\{...\}` and unions;
4. math-verify finds their expressions, equations, inequalities or matrices equal.

Words differ unless their texts are the same. Units count only when both name one and the two are
known to differ (`5 cm`, `5 m`). An equation `a = b = c` may answer a question for a value: its
first side may be a name (`x`, `f(2)`, `\angle A`), and all others must be the answer.

Only step 4 can take long. It runs without a limit of its own, since the scoring process that this
is called in is killed by `task.reward_timeout_s`.
"""

import logging
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from tba.tasks.final_answer import find_answer
from tba.tasks.notation import (
    OPENING,
    closes_itself,
    normal_form,
    read_number,
    split_top_level,
    split_unit,
    units_differ,
    without_spaces,
)
from tba.tasks.rewards import text_of

_MAX_DEPTH = 12
"""Brackets of an expression may be nested this deep; those of MATH are, 3."""
_MAX_ELEMENTS = 20
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS_BEHIND = re.compile(r"[\d})%]\s+([a-zA-Z]{2,}.*)", re.DOTALL)
_CHOICE = re.compile(r"\(([A-Z])\)\s*\S")
_WORD = re.compile(r"[A-Za-z.]+")
_LETTERS = (
    r"(?:\\(?:angle|triangle|alpha|beta|gamma|delta|theta|phi|omega|lambda|mu|sigma|rho|sin|cos|tan|cot|"
    r"sec|csc|log|ln|gcd|lcm|min|max)(?![a-zA-Z])|\\text\{[^{}]*\}|\\(?:overline|vec|widehat)\{[A-Za-z]*\}"
    r"|[a-zA-Z]'?(?:_(?:\w|\{\w+\}))?|\s)+"
)
_NAME = re.compile(rf"[\[|(]?{_LETTERS}(?:,{_LETTERS})*[\]|)]?(?:\([^=<>]*\))?")
_OPERATIONS = r"\\(?:frac|cdot|times|div)(?![a-zA-Z])|[\d\s{}()+*/,-]"
_RATIONAL = re.compile(rf"(?:{_OPERATIONS})+")
_WITH_DECIMALS = re.compile(rf"(?:{_OPERATIONS}|[\[\].^!%])+")
_INEQUALITY = re.compile(
    r"(?:(?P<left>[^<>]+?)(?P<above><|\\le(?![a-z])))?\s*[a-z]\s*"
    r"(?P<relation><|>|\\[lg]e(?![a-z]))(?P<right>[^<>=]+)"
)
_RELATION = re.compile(r"(<|>|\\[lg]e(?![a-z]))")
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def math(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Reward a response whose final answer is the `answer` column's, as mathematics."""
    # It warns that it has no time limit; the scoring process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found = [find_answer(text_of(c)) for c in completions]
    return [
        float(f is not None and is_same_answer(str(a), f))
        for f, a in zip(found, answer, strict=True)
    ]


def is_same_answer(gold: str, found: str) -> bool:
    """Say whether an answer is the gold one; both are LaTeX or plain text without dollar signs.

    `3,125` without a space is read both as a number and as a list: MATH writes both so.
    """
    readings = [
        (normal_form(gold, thousands=thousands), normal_form(found, thousands=thousands))
        for thousands in (True, False)
    ]
    return any(_is_same(*reading) for reading in dict.fromkeys(readings))


def _is_same(gold: str, found: str) -> bool:
    letters = _letters(gold)
    if letters == _letters(found) or _WORD.fullmatch(letters):
        return letters in (_letters(found), _choice(found))
    name, _, rest = found.partition("=")
    if rest and "=" not in gold and _NAME.fullmatch(name.strip()):
        return _is_same(gold, rest.strip())
    gold, gold_unit = split_unit(gold)
    found, found_unit = split_unit(found)
    if units_differ(gold_unit, found_unit) or (found_unit.startswith("base ") and not gold_unit):
        return False
    if (same := _same_number(gold, found)) is not None:
        return same
    for compare in (_same_union, _same_list, _same_group):
        if (same := compare(gold, found)) is not None:
            return same
    return _same_expression(gold, found)


def _letters(text: str) -> str:
    """Return a text without spaces, and words as in a sentence; variables keep their case."""
    text = without_spaces(_TEXT.sub(r"\1", text))
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    if len(text) < 2 or not _WORD.fullmatch(text):
        return text
    return text.lower() if text.isupper() and len(text) > 2 else text[0].lower() + text[1:]


def _choice(text: str) -> str | None:
    """Return the letter of a choice with what it says, as in `(C) 5`."""
    match = _CHOICE.match(_TEXT.sub(r"\1", text))
    return match[1] if match else None


def _same_number(gold: str, found: str) -> bool | None:
    """Compare two numbers; a percentage is its number or a hundredth of it. None: not both are."""
    a, b = read_number(gold), read_number(found)
    if a is not None and b is None and closes_itself(found):
        b = read_number(found[1:-1])
    if a is None or b is None:
        return None
    if gold.endswith("%") == found.endswith("%"):
        return a == b
    return a in (b, b / 100) if found.endswith("%") else b in (a, Fraction(a, 100))


def _same_union(gold: str, found: str) -> bool | None:
    return _compared(
        *(split_top_level(text, r"\cup") for text in (gold, found)), match=_match_any_order
    )


def _same_list(gold: str, found: str) -> bool | None:
    """Compare lists without brackets or in braces, of which the order does not matter."""
    return _compared(*map(_set_elements, (gold, found)), match=_match_any_order)


def _same_group(gold: str, found: str) -> bool | None:
    """Compare tuples and intervals: the same brackets, and the same elements in order."""
    if closes_itself(gold) and (match := _INEQUALITY.fullmatch(_ascending(found))):
        found = _interval(**match.groupdict(default=""))
    groups = [closes_itself(text) for text in (gold, found)]
    if groups == [False, False]:
        return None
    parts = [split_top_level(text[1:-1], ",") for text in (gold, found)]
    if len(parts[0]) == len(parts[1]) == 1:
        return None  # an expression in brackets
    return (
        groups == [True, True]
        and (gold[0], gold[-1]) == (found[0], found[-1])
        and _match_in_order(*parts)
    )


def _ascending(text: str) -> str:
    """Write `2 < x` as `x > 2`, and `2 > x > 1` as `1 < x < 2`; other texts stay."""
    parts = _RELATION.split(text)
    descends = len(parts) == 5 and {parts[1], parts[3]} <= {">", "\\ge"}
    if descends or (len(parts) == 3 and re.fullmatch(r"\s*[a-z]\s*", parts[2])):
        return "".join(_MIRRORED.get(part, part) for part in reversed(parts))
    return text


def _interval(left: str, above: str, relation: str, right: str) -> str:
    """Write `left < x < right`, or `x < right` or `x > right`, as an interval."""
    if relation in (">", "\\ge"):
        # `a < x > b`, which is no interval, gets a third element
        return f"{'(' if relation == '>' else '['}{left + ',' if left else ''}{right},\\infty)"
    opening = "[" if above == "\\le" else "("
    closing = "]" if relation == "\\le" else ")"
    return opening + (left or "-\\infty") + "," + right + closing


def _set_elements(text: str) -> list[str]:
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    parts = split_top_level(text, ",")
    return [
        sign.join(part.split("\\pm"))
        for part in parts
        for sign in (("+", "-") if "\\pm" in part else ("",))
    ]


def _compared(
    gold: list[str], found: list[str], *, match: Callable[[list[str], list[str]], bool]
) -> bool | None:
    """Compare elements; None where both sides are a single one."""
    if len(gold) == len(found) == 1:
        return None
    return len(gold) == len(found) <= _MAX_ELEMENTS and match(gold, found)


def _match_in_order(gold: list[str], found: list[str]) -> bool:
    return len(gold) == len(found) <= _MAX_ELEMENTS and all(
        _is_same(a, b) for a, b in zip(gold, found, strict=True)
    )


def _match_any_order(gold: list[str], found: list[str]) -> bool:
    left = list(found)
    for a in gold:
        match = next((i for i, b in enumerate(left) if _is_same(a, b)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _same_expression(gold: str, found: str) -> bool:
    if _depth(found) > _MAX_DEPTH:
        return False
    if "\\text{" in found and "\\text{" not in gold:
        return False  # words that are no unit
    if (words := _WORDS_BEHIND.search(found)) and words[1] not in gold:
        return False  # nor are these, though math-verify passes them over
    has_decimals = "." in found and _WITH_DECIMALS.fullmatch(found)
    if has_decimals and "." not in gold and not _RATIONAL.fullmatch(gold):
        return False  # a rounded value of an exact one
    if "=" in found and "=" not in gold:
        return all(_is_same(gold, side.strip()) for side in found.split("="))
    return verify(_parsed(gold), _parsed(found), timeout_seconds=None)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in OPENING) - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _parsed(text: str) -> list[Any]:
    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
