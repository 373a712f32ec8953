"""Profiles with round figures."""

from tba.config import Config
from tba.config.load import load_config
from tba.plan.profile import Cost, Profile, Responses

QUERIES, SAMPLES, LENGTH = 4, 4, 10
"""Of a search batch and of a trainer's batch alike; tokens of every response."""


def made_profile(**values) -> Profile:
    """Return a profile in which a search batch takes 1 s, a step .25 s, all else nothing."""
    fields = {
        "config": made_config().model_dump(mode="json"),
        "cores": 16,
        "places": 16,
        "trainer_slowdown": 1.0,
        "searcher_slowdown": 1.0,
        "search": Cost(1.0, 0.0, 0.0),
        "stages_s": {"generating": 1.0},
        "pull_s": 0.0,
        "step": Cost(0.25, 0.0, 0.0),
        "publish_s": 0.0,
        "hash_s": 0.0,
        "store_s": 0.0,
        "store_wait_s": 0.0,
        "add_s": 0.0,
        "weight_bytes": 10**9,
        "gradient_bytes": 2 * 10**9,
        "queries": 1_000,
        "responses": Responses([[LENGTH] * SAMPLES] * 8, [list(range(SAMPLES))] * 8),
    }
    return Profile(**{**fields, **values})


def made_config(*overrides: str) -> Config:
    """Return a run of small batches that draws from the m branch alone."""
    own = [
        f"--search.queries_per_batch={QUERIES}",
        f"--search.samples_per_query={SAMPLES}",
        f"--trainer.queries_per_batch={QUERIES}",
        f"--trainer.samples_per_query={SAMPLES}",
        f"--buffer.initial_samples={QUERIES * SAMPLES}",
        "--buffer.on_policy_prob=1.0",
        "--buffer.recent_versions=1",
    ]
    return load_config(["arithmetic"], [*own, *overrides])
