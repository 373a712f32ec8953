"""Synchronisation, processes, evaluation and the run folder."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tba.config.base import Section


class SyncConfig(Section):
    """When weights go to the searchers and trajectories come back."""

    mode: Literal["free", "barrier", "lockstep"] = "free"
    """free: nobody waits; barrier: everybody meets at each sync (the paper's); lockstep: search and
    training alternate."""
    sync_every: PositiveInt = 2
    """k: trainer steps between two publications of the weights."""
    searches_per_round: PositiveInt | None = None
    """Search batches of each searcher between two syncs in lockstep mode; by default just what k
    steps consume."""
    reference_reset_every: PositiveInt | None = None
    """rho: every this many steps the reference becomes the policy of that step."""
    timeout_s: PositiveFloat = 600.0
    """A searcher silent for this long, in seconds, is killed and replaced; after twice as long
    without progress the trainer gives up waiting, and the run ends and says who was waited for.
    What task.reward_timeout_s allows scoring to take comes on top of either."""
    stall_warning_s: PositiveFloat = 60.0
    """A searcher without a sign of life for this long is named in the log."""


class InlineRuntimeConfig(Section):
    """One process in which searching and training take turns; bit-deterministic."""

    kind: Literal["inline"] = "inline"
    """Runtime kind."""


class LocalRuntimeConfig(Section):
    """One process for the trainer and one for each searcher, on this machine."""

    kind: Literal["local"] = "local"
    """Runtime kind."""
    trainer_threads: PositiveInt | None = None
    """Threads of the trainer; by default the cores shared out evenly among the processes, at least
    1."""
    searcher_threads: PositiveInt | None = None
    """Threads of each searcher; the same default."""
    max_restarts: NonNegativeInt = 5
    """Deaths in a row without a delivery after which a searcher is not replaced any more."""


RuntimeConfig = Annotated[InlineRuntimeConfig | LocalRuntimeConfig, Field(discriminator="kind")]


class EvaluationConfig(Section):
    """Accuracy on held-out queries, measured before and after the run."""

    queries: PositiveInt = 1_000
    """Held-out queries asked, from the first on; all of them when there are fewer."""
    every: NonNegativeInt = 0
    """Trainer steps between evaluations during the run, moved on to the next sync; 0: none. A
    checkpoint is evaluated by a process of its own (runtime inline: the trainer pauses)."""
    timeout_s: PositiveFloat = 3600.0
    """Longest time for such an evaluation, in seconds; then it is given up."""
    queries_per_batch: PositiveInt = 128
    """Queries generated at a time."""


class CheckpointConfig(Section):
    """What is kept for resuming."""

    every: NonNegativeInt = 100
    """Trainer steps between checkpoints, moved on to the next sync; 0: only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
