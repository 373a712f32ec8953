"""What makes a run a supervised fine-tuning: `tba sft` and `tba.sft`.

DEFAULTS    lies under the sources: what suits most, for them to change
SUPERVISED  lies over the sources, so that any recipe can be fine-tuned on its demonstrations;
            single settings go on top, and what contradicts it is refused by the usual rules
"""

from collections.abc import Sequence

from tba.config import Config
from tba.config.load import Tree, load_config

DEFAULTS: Tree = {
    "task": {"kind": "custom"},
    "search": {"max_completion_length": 512},
    "trainer": {
        "queries_per_batch": 32,
        "learning_rate": 2e-5,
        "learning_rate_schedule": {"kind": "cosine", "warmup_steps": 20},
    },
}
SUPERVISED: Tree = {
    "warm_start": {"steps": 0},
    "search": {"searchers": 0, "temperature": 1.0},
    "buffer": {"given": "demonstrations", "max_staleness": None, "max_reuse": None},
    "objective": {"kind": "sft"},
    "trainer": {"samples_per_query": 1},
    "sync": {"mode": "free", "reference_reset_every": None},
}


def load_sft_config(sources: Sequence[str | Config], overrides: Sequence[str] = ()) -> Config:
    """Return the supervised fine-tuning that `sources` describe, with `overrides` on top.

    Raises:
        ConfigError: Something is unknown, missing, mistyped, out of range or contradictory.
    """
    return load_config([DEFAULTS, *sources, SUPERVISED], overrides)
