"""Compares a policy's answers with others under a gold judge, and says how varied they are.

    win rate     share of answers that the judge scores higher than the other answer to the same
                 query, ties counting half; two other answers: the one that the held-out row gives,
                 and the reference's, sampled in the same way
    gold reward  the judge's mean score of the policy's answers
    length       mean tokens of an answer, its end-of-sequence token included
    distinct-n   different sequences of n words over all sequences of n words, in all answers
                 together (Li et al., 1510.03055); words are what white space separates

The judge is a process of its own, started for each evaluation. A score that fails takes its
comparison out, and is counted: it is never a loss.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tba.errors import AllExcludedError
from tba.records import Outcome, Query
from tba.tasks.base import Answered, RewardSpec
from tba.tasks.scoring import Scorer

JUDGED_AT_A_TIME = 64
"""Answers sent to the judge at a time."""

Scores = NDArray[np.float64]


class Comparison:
    """The measure (`tba.tasks.base.Measure`) of preference tuning."""

    def __init__(self, judge: RewardSpec | None, given: Sequence[str | None]) -> None:
        """Take the judge, and the given answer of each held-out query that has one."""
        self._judge = judge
        self._given = given

    def __call__(self, answered: Answered) -> Mapping[str, float]:
        """Return length, distinct-n and, where there is a judge, gold reward and win rates.

        Raises:
            UserCodeError: The judge cannot be used.
            AllExcludedError: No answer of the policy, or no comparison, could be judged.
        """
        found = {"length": float(np.mean([len(r.tokens) for r in answered.responses]))}
        for n in (1, 2):
            share = distinct(answered.texts, n)
            found |= {} if share is None else {f"distinct_{n}": share}
        if self._judge is None:
            return found
        with Scorer(self._judge) as scorer:
            return found | self._judged(scorer, answered)

    def _judged(self, scorer: Scorer, answered: Answered) -> dict[str, float]:
        own = _scores(scorer, answered.queries, answered.texts)
        found = {"gold_reward": _mean(own, "the gold reward")}
        out = np.isnan(own)
        if (given := self._given_scores(scorer, answered.queries)) is not None:
            found["win_rate_given"] = win_rate(own, given)
            has_one = [self._given[query.query_id] is not None for query in answered.queries]
            out |= np.isnan(given) & has_one
        if answered.reference_texts is not None:
            reference = _scores(scorer, answered.queries, answered.reference_texts)
            found["win_rate_reference"] = win_rate(own, reference)
            out |= np.isnan(reference)
        return {**found, "judge_excluded": float(out.sum())}

    def _given_scores(self, scorer: Scorer, queries: Sequence[Query]) -> Scores | None:
        """Return the score of the answer given to each query, judged once; None without any."""
        asked = {query.query_id: query for query in queries}
        texts = {number: text for number in asked if (text := self._given[number]) is not None}
        if not texts:
            return None
        scores = _scores(scorer, [asked[number] for number in texts], list(texts.values()))
        of_query = dict(zip(texts, scores.tolist(), strict=True))
        return np.array([of_query.get(query.query_id, np.nan) for query in queries])


def win_rate(own: Scores, other: Scores) -> float:
    """Return the share of comparisons won, a tie counting half; NaN takes one out.

    Raises:
        AllExcludedError: All are out.
    """
    wins = np.where(own > other, 1.0, np.where(own == other, 0.5, 0.0))
    wins[np.isnan(own) | np.isnan(other)] = np.nan
    return _mean(wins, "a win rate")


def distinct(texts: Sequence[str], n: int) -> float | None:
    """Return different n-grams of words over all of them; None where no text has n words."""
    words = [text.split() for text in texts]
    grams = [tuple(own[i : i + n]) for own in words for i in range(len(own) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def _scores(scorer: Scorer, queries: Sequence[Query], texts: Sequence[str]) -> Scores:
    """Return the judge's score of each text, NaN where it failed; shape [text]."""
    scores: list[float] = []
    for first in range(0, len(texts), JUDGED_AT_A_TIME):
        batch = texts[first : first + JUDGED_AT_A_TIME]
        judged = scorer.score(queries[first : first + JUDGED_AT_A_TIME], batch, tokens=None)
        scores += [s.reward for s in judged]
        if np.isnan(scores).all():
            first_failure = next(s for s in judged if s.outcome is not Outcome.OK)
            raise AllExcludedError(
                f"none of the first {len(scores)} answers could be judged (the first: "
                f"{first_failure.detail or first_failure.outcome.value}): repair task.judge"
            )
    return np.array(scores)


def _mean(values: Scores, what: str) -> float:
    if np.isnan(values).all():
        raise AllExcludedError(
            f"{what} cannot be told because the judge failed on every answer: repair task.judge"
        )
    return float(np.nanmean(values))
