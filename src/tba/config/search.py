"""How searchers generate, and what the buffer keeps and gives back."""

import operator
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tba.config.base import Section, Temperature

Precision = Literal["float32", "bfloat16", "int8", "float8"]
Given = Literal["nothing", "pairs", "demonstrations"]
"""Which answers come with the training rows."""


class SearchConfig(Section):
    """The searcher's box of the algorithm."""

    searchers: NonNegativeInt = 1
    """Number of searchers; 0, which needs buffer.given: nobody searches, and each
    batch takes the queries that were drawn least (epochs)."""
    queries_per_batch: PositiveInt = 8
    """Queries a searcher takes at a time."""
    samples_per_query: PositiveInt = 24
    """S: responses generated for each query; at least K, since duplicates are merged."""
    temperature: Temperature = 1.0
    """Divides the logits of policy and reference alike, in generation and in both
    log-probabilities."""
    temperature_range: tuple[Temperature, Temperature] | None = None
    """Samples each search batch at a temperature drawn uniformly from this range instead; the
    log-probabilities that are learned from stay at `temperature`."""
    max_completion_length: PositiveInt = 128
    """Longest response in tokens, the end-of-sequence token included."""
    precision: Precision = "float32"
    """Precision of the searcher's policy: float32, bfloat16, or bfloat16 with 8-bit linear layers
    (int8, hardly quicker on the CPUs it was measured on and, with SmolLM2, .26 nats a token from
    the trainer's probabilities instead of .04; float8 on GPUs since Hopper). Weights travel in
    float32 or bfloat16, and the reference is computed in it."""

    @model_validator(mode="after")
    def _range_is_ascending(self) -> Self:
        if self.temperature_range is not None and not operator.le(*self.temperature_range):
            raise ValueError(
                f"search.temperature_range is {list(self.temperature_range)}: the first number "
                "must not be the larger"
            )
        return self

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Number format of weights on the wire, and of all that is not in 8 bits."""
        return "float32" if self.precision == "float32" else "bfloat16"


class NearDuplicatesKept(Section):
    """Only samples of equal tokens are merged."""

    kind: Literal["keep"] = "keep"
    """Rule."""


class NearByEditDistance(Section):
    """Two samples are near if their edit distance is below a share of their lengths together."""

    kind: Literal["edit_distance"] = "edit_distance"
    """Rule."""
    share: float = Field(default=0.25, gt=0, lt=0.5)
    """That share; distance and lengths are in tokens."""


class NearByCosine(Section):
    """Two samples are near if their sentence embeddings (task.embedder) are."""

    kind: Literal["cosine"] = "cosine"
    """Rule."""
    above: float = Field(default=0.4, gt=-1, lt=1)
    """Cosine beyond which two are near."""


NearDuplicatesConfig = Annotated[
    NearDuplicatesKept | NearByEditDistance | NearByCosine, Field(discriminator="kind")
]


class BufferConfig(Section):
    """The replay buffer: what it keeps, and how a batch is drawn from it."""

    capacity_per_query: PositiveInt = 100
    """Unique samples kept of each query."""
    evict: Literal["oldest", "lowest"] = "oldest"
    """Which sample beyond the capacity goes: the oldest, or the one of the lowest reward."""
    near_duplicates: NearDuplicatesConfig = NearDuplicatesKept()
    """Of two samples of a query that are near only the one of the higher reward is kept; the
    defaults are those of Lee et al."""
    given: Given = "nothing"
    """Starts the buffer with answers of the training rows: pairs, columns chosen (reward 1) and
    rejected (reward 0); or demonstrations, column completion or the task's own (reward 1; with
    task.kind redteam they are attacks, which victim and classifier score)."""
    initial_samples: NonNegativeInt = 500
    """Trajectories found before the first trainer step; given answers are not counted."""
    on_policy_prob: float = Field(default=0.95, ge=0, le=1)
    """m: probability, drawn for each query of a batch, of taking a query of the most recent
    sync."""
    recent_versions: PositiveInt = 1
    """The most recent samples are those of this many newest policy versions in the buffer."""
    off_policy_sampling: Literal["uniform", "softmax_reward"] = "uniform"
    """How the other branch chooses K samples of a query: uniformly or by softmax of the reward."""
    reward_temperature: Temperature = 1.0
    """Divides the rewards inside that softmax."""
    skip_equal_rewards: bool = False
    """Passes over queries whose samples all have the same reward, as long as others are found: they
    teach methods that compare samples next to nothing (DAPO's dynamic sampling)."""
    max_staleness: PositiveInt | None = None
    """Samples older than this many versions are not drawn (they are kept)."""
    max_reuse: PositiveInt | None = None
    """A sample is drawn in at most this many batches; the trainer waits for new ones when none is
    left."""

    @property
    def needs_embeddings(self) -> bool:
        """Whether samples are compared by sentence embeddings."""
        return isinstance(self.near_duplicates, NearByCosine)
