"""Built-in reward functions: 1.0 for a correct answer, 0.0 for a wrong one.

Each takes the `answer` column. None evaluates what the policy wrote; all are linear in its length.
The built-in reward `math` is in `tba.tasks.grading`.

What counts as the answer of a response, `last_number`:

* its last number, equal in value to the answer: `53`, `53.`, `53.0`, `$53`, `**53**`, `1,053`;
* which is a result, no operand: the `79` of `5+79`, of `8 x 79`, of `2^79` and of `sqrt(79)`, and
  the `6` of `53 is 47 + 6` are refused, and so are `79 thousand` and `79k`;
* and is well written: `053`, `1,05`, `x53`, `5.3.0` and `= - 53` (a sign set apart) are refused.

`arithmetic` is stricter where a response has no words: it must be the number alone (`53`, `53.`) or
the question restated (`47 + 6 = 53`). So one rule serves a character model, whose answer to
`12+34=` is `46` and not `1=46`, and a chat model that writes sentences.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import islice
from types import MappingProxyType
from typing import Any

BUILT_IN = MappingProxyType(
    {
        name: f"tba.tasks.rewards:{name}"
        for name in ("arithmetic", "exact_match", "gsm8k", "last_number")
    }
    | {"math": "tba.tasks.grading:math"}
)
"""Short names of reward functions."""

_ASCII_SIGNS = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{MULTIPLICATION SIGN}": "*"}
)
_BOLD = re.compile(r"(?<!\d)\*\*|\*\*(?!\d)")
_PLUS_SIGN = re.compile(r"^\s*\+(?=\$?[0-9])")
_NUMERAL = re.compile(r"[0-9][0-9.,]*")
_WELL_WRITTEN = re.compile(r"(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?")
_OPERATOR_BEFORE = re.compile(
    r"(?:[-+*/^\N{DIVISION SIGN}]|\b(?:times|plus|minus|over|divided by|multiplied by|log|sqrt)"
    r"|\d\s*x|[a-z]\()\s*$",
    re.IGNORECASE,
)
_MULTIPLE_BEHIND = re.compile(
    r"\s*(?:\^|(?:-\s*)?\b(?:(?:dozen|hundred|thousand|(?:m|b|tr)illion)s?|squared|cubed|doubled|tripled"
    r"|halves|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths)\b"
    r"|(?-i:[kKMB]|bn|mn)(?![a-zA-Z]))",
    re.IGNORECASE,
)
_OPERATOR_BEHIND = re.compile(
    r"\s*(?:[-!+*/\N{DIVISION SIGN}]|\b(?:plus|minus|over|point|or|divided|multiplied"
    r"|times (?:one|two|three|four|five|six|seven|eight|nine|ten))\b)",
    re.IGNORECASE,
)
_NOT = re.compile(r"\b(?:not|never|wrong|incorrect|false)\b|n't\b", re.IGNORECASE)
_NO_WORDS = re.compile(r"[\d\s.,+\-*/=]*")


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Reward a response that is the answer, white space around it aside."""
    return [
        float(text_of(c).strip() == str(a).strip())
        for c, a in zip(completions, answer, strict=True)
    ]


def last_number(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Reward a response whose last number equals the answer."""
    return [
        float(_same(find_last_number(text_of(c)), find_last_number(str(a))))
        for c, a in zip(completions, answer, strict=True)
    ]


def arithmetic(
    completions: Sequence[Any],
    answer: Sequence[str],
    a: Sequence[int],
    op: Sequence[str],
    b: Sequence[int],
) -> list[float]:
    """Reward a response whose last number is the answer, wordless only in the forms above."""
    correct = last_number(completions, answer)
    questions = zip(a, op, b, strict=True)
    return [
        c if _is_answer_form(text_of(text), *question) else 0.0
        for c, text, question in zip(correct, completions, questions, strict=True)
    ]


def gsm8k(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Reward a response whose final answer equals that of the reference solution."""
    return [
        float(_same(find_final_answer(text_of(c)), find_final_answer(str(a))))
        for c, a in zip(completions, answer, strict=True)
    ]


def find_final_answer(text: str) -> Decimal | None:
    """Return the number after the last `####`, or the last number where there is no `####`.

    It must be the one number of its line, without an operator behind it; a plus sign may precede.
    """
    _, mark, end = text.rpartition("####")
    if not mark:
        return find_last_number(text)
    line = _PLUS_SIGN.sub("", _plain(end.lstrip().partition("\n")[0]))
    numerals = list(islice(_NUMERAL.finditer(line), 2))
    if len(numerals) != 1 or _NOT.search(line) or _OPERATOR_BEHIND.match(line, numerals[0].end()):
        return None
    return _value(line, numerals[0])


def find_last_number(text: str) -> Decimal | None:
    """Return the last number of a text, or None where it is not well written or an operand."""
    text = _plain(text)
    numerals = list(_NUMERAL.finditer(text))
    return _value(text, numerals[-1]) if numerals else None


def text_of(completion: Any) -> str:
    """Return the text of a completion in either of TRL's forms."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _value(text: str, numeral: re.Match[str]) -> Decimal | None:
    digits = numeral.group().rstrip(".,")
    before = text[: numeral.start()].rstrip("$")
    negative = before.endswith("-")
    if negative:
        before = before[:-1]
    attached = before[-1:]
    before = before.rstrip()
    operand = _OPERATOR_BEFORE.search(before[-20:]) or (negative and before[-1:].isdigit())
    if (
        operand
        or _MULTIPLE_BEHIND.match(text, numeral.end())
        or attached.isalpha()
        or attached in ("_", ".")
        or not _WELL_WRITTEN.fullmatch(digits)
    ):
        return None
    value = Decimal(digits.replace(",", ""))
    return -value if negative else value


def _is_answer_form(text: str, a: int, op: str, b: int) -> bool:
    text = _plain(text).strip()
    if not _NO_WORDS.fullmatch(text):
        return True
    question = rf"{a}\s*{re.escape(op)}\s*{b}\s*="
    return re.fullmatch(rf"(?:{question})?\s*-?\d[\d.,]*", text) is not None


def _plain(text: str) -> str:
    """Write minus and times signs in ASCII, and drop marks of bold type (`**` that is no power)."""
    return _BOLD.sub(" ", text.translate(_ASCII_SIGNS))


def _same(found: Decimal | None, answer: Decimal | None) -> bool:
    return found is not None and found == answer
