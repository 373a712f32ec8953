"""The gold judge of the preference twin: how glad a text sounds, less how much it repeats itself.

    judge(y) = compound(y) - repeated(y), in [-2, 1]

`compound` is VADER's sentiment in [-1, 1] (Hutto and Gilbert 2014; package vaderSentiment),
`repeated` the share of words that stand earlier in the text already. Without the second term "great
great great" would be the best of all answers. An answer without a word scores 0.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from tba.errors import UserCodeError

_WORD = re.compile(r"[a-z0-9']+")


def judge(completions: Sequence[str], **columns: Any) -> list[float]:
    """Return the judgement of each completion; a reward function in TRL's form.

    Raises:
        UserCodeError: VADER is not installed.
    """
    del columns
    analyser = _analyser()
    return [analyser.polarity_scores(text)["compound"] - repeated(text) for text in completions]


def repeated(text: str) -> float:
    """Return the share of words that stand earlier in the text already; 0 without words."""
    words = _WORD.findall(text.lower())
    return 1 - len(set(words)) / len(words) if words else 0.0


@cache
def _analyser() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise UserCodeError(
            "the gold judge is VADER, which is not installed: pip install vaderSentiment"
        ) from error
    return SentimentIntensityAnalyzer()
