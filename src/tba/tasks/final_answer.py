r"""Finds the final answer of a response, as text; evaluates nothing and takes linear time.

The answer of a response is what its strongest mark marks:

1. what is inside its last `\boxed{...}`; a last box that never closes marks no answer;
2. else what follows its last `####`, up to the end of the line;
3. else what follows its last `answer is` or `answer:`, up to the end of the sentence or line;
4. else, without any of these, the formula between dollar signs or the number that stands last; a
   number that is an operand (`5 + 3`) is none.

An answer of more than `MAX_ANSWER` characters is none: the longest of MATH has 81.
"""

import re

from tba.tasks.rewards import find_last_number

MAX_ANSWER = 300
_TAIL = 2_000
"""Characters at the end of a response among which an answer without a mark is looked for."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_ANSWER_IS = re.compile(r"answer(?: is|[ *]{0,3}:)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!\\)[.?!](?:\s|$)|\n")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATH_MARKS = re.compile(r"\\[()\[\]]|\*\*|(?<!\\)\$(?![\d.]+[^$]*$)")


def find_answer(text: str) -> str | None:
    """Return the final answer of a response, or None where it gives none."""
    if _is_marked(text):
        return find_marked_answer(text)
    return _bounded(_last_formula_or_number(text[-_TAIL:]))


def find_marked_answer(text: str) -> str | None:
    """Return what a box, `####` or `answer is` marks as the answer, or None."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _bounded(_inside(text[boxes[-1].end() :][: 2 * MAX_ANSWER].lstrip(" ")))
    _, mark, end = text.rpartition("####")
    if mark:
        line = end[: 2 * MAX_ANSWER].strip().partition("\n")[0]
        return _bounded(_MATH_MARKS.sub("", line))
    phrases = list(_ANSWER_IS.finditer(text))
    if not phrases:
        return None
    end = text[phrases[-1].end() :][: 2 * MAX_ANSWER].lstrip(" \n:*")
    return _bounded(_MATH_MARKS.sub("", _SENTENCE_END.split(end, maxsplit=1)[0]))


def find_box(text: str) -> str | None:
    r"""Return what is inside the last `\boxed{...}` of a text, or None."""
    return find_marked_answer(text) if _BOX.search(text) else None


def _is_marked(text: str) -> bool:
    return "####" in text or any(p.search(text) for p in (_BOX, _ANSWER_IS))


def _inside(text: str) -> str | None:
    """Return what is between the brace that a text begins with and its match.

    Without a brace, TeX boxes one token; what is written is read up to a dollar sign or a space.
    """
    if not text.startswith("{"):
        return re.split(r"[$\s]", text, maxsplit=1)[0]
    depth = 0
    for position, character in enumerate(text):
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
        if depth == 0:
            return text[1:position]
    return None


def _last_formula_or_number(text: str) -> str | None:
    number = find_last_number(text)
    formulas = [m for m in _FORMULA.finditer(text) if not re.search(r"\d", text[m.end() :])]
    if formulas:
        return next(group for group in formulas[-1].groups() if group is not None)
    return None if number is None else str(number)


def _bounded(answer: str | None) -> str | None:
    answer = (answer or "").strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None
