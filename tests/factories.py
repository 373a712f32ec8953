"""Trajectories as a searcher makes them, with what a test cares about filled in."""

import numpy as np

from tba.records import FinishReason, Outcome, Score, Trajectory


def trajectory(query_id=0, tokens=(7, 8, 2), reward=1.0, version=0, **fields):
    """Make one scored response; its log-probabilities are told apart by reward and version."""
    tokens = np.array(tokens, dtype=np.int32)
    defaults = {
        "prompt_ids": np.array([1, 10 + query_id], dtype=np.int32),
        "text": "".join(chr(97 + t % 26) for t in tokens),
        "log_mu": np.float32(-0.5) - np.arange(len(tokens), dtype=np.float32),
        "log_ref": np.full(len(tokens), -1 - version, dtype=np.float32),
        "score": Score(Outcome.OK, reward),
        "finish_reason": FinishReason.STOP,
        "reference_version": 0,
        "ticket": version,
        "searcher": 0,
        "temperature": 0.7,
    }
    return Trajectory(
        query_id=query_id, tokens=tokens, policy_version=version, **{**defaults, **fields}
    )


def excluded(query_id=0, outcome=Outcome.TIMEOUT):
    """Make a response whose reward failed."""
    return trajectory(query_id, score=Score(outcome, float("nan"), "killed after 5 s"))


def distinct(query_id, count, version=0, first=0, reward=1.0):
    """Make `count` different responses to one query."""
    return [
        trajectory(query_id, (first + i, 2), reward=reward, version=version) for i in range(count)
    ]
