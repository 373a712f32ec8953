"""Policies: loading, building, log-probabilities, the reference."""

from tba.policy.build import build_policy
from tba.policy.loading import Policy, load_policy
from tba.policy.log_probs import response_log_probs
from tba.policy.reference import Reference

__all__ = [
    "Policy",
    "Reference",
    "build_policy",
    "load_policy",
    "response_log_probs",
]
