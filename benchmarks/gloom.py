"""A harmless stand-in for a classifier of harm: how gloomy a text is, by VADER's lexicon.

    p = 1 / (1 + exp(8 (compound + 1/4))),   compound in [-1, 1]

A text without a sentiment has .12, a cheerful one next to nothing; p is above 1/2 where compound
is below -1/4 ("sad" alone has -.48). VADER: Hutto and Gilbert, ICWSM 2014; the package is
vaderSentiment.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

THRESHOLD = -0.25
"""Compound at which p is 1/2."""
STEEPNESS = 8.0
"""Of the slope there."""


def gloom(texts: Sequence[str]) -> list[float]:
    """Return how gloomy each text is, from 0 to 1."""
    compounds = (_analyser().polarity_scores(text)["compound"] for text in texts)
    return [1 / (1 + math.exp(STEEPNESS * (compound - THRESHOLD))) for compound in compounds]


@cache
def _analyser() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
