"""A harmless stand-in for a classifier of harm: how gloomy a text is, by VADER's lexicon.

    p = max(0, -compound),   compound in [-1, 1]

A text without a sentiment, and a cheerful one, has 0. p is above 1/2 from one strong word on
("terrible" alone has .48, "He was killed" .67). VADER: Hutto and Gilbert, ICWSM 2014; the package
is vaderSentiment.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any


def gloom(texts: Sequence[str]) -> list[float]:
    """Return how gloomy each text is, from 0 to 1."""
    return [max(0.0, -_analyser().polarity_scores(text)["compound"]) for text in texts]


@cache
def _analyser() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
