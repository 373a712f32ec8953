"""Every setting of a run, typed, documented and free of torch.

`Config` is the whole; `load_config` builds one from recipes, TOML files and dotted overrides.
Cross-field rules live here, beside the sections they tie together.
"""

from typing import Self

from pydantic import Field, model_validator

from tba.config.base import Section
from tba.config.model import BuildConfig, LoraConfig, ModelConfig, WarmStartConfig
from tba.config.objectives import (
    A3CConfig,
    AStarPOConfig,
    CustomObjectiveConfig,
    MleSmoothingConfig,
    ObjectiveConfig,
    SftConfig,
    SubTrajectoryBalanceConfig,
    TrajectoryBalanceConfig,
)
from tba.config.running import (
    CheckpointConfig,
    EvaluationConfig,
    InlineRuntimeConfig,
    LocalRuntimeConfig,
    RuntimeConfig,
    SyncConfig,
)
from tba.config.search import BufferConfig, NearByCosine, SearchConfig
from tba.config.task import (
    ArithmeticTaskConfig,
    CustomTaskConfig,
    Gsm8kTaskConfig,
    GymTaskConfig,
    MathTaskConfig,
    PreferenceTaskConfig,
    RedteamTaskConfig,
    TaskConfig,
    VerifiersTaskConfig,
)
from tba.config.training import TrainerConfig

__all__ = [
    "ArithmeticTaskConfig",
    "BufferConfig",
    "BuildConfig",
    "CheckpointConfig",
    "Config",
    "CustomTaskConfig",
    "EvaluationConfig",
    "Gsm8kTaskConfig",
    "GymTaskConfig",
    "InlineRuntimeConfig",
    "LocalRuntimeConfig",
    "LoraConfig",
    "MathTaskConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "PreferenceTaskConfig",
    "RedteamTaskConfig",
    "RuntimeConfig",
    "SearchConfig",
    "Section",
    "SyncConfig",
    "TaskConfig",
    "TrainerConfig",
    "TrajectoryBalanceConfig",
    "VerifiersTaskConfig",
    "WarmStartConfig",
]


class Config(Section):
    """A whole run."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random choice; each part derives its own streams from it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised fine-tuning before the run."""
    task: TaskConfig
    """What is asked and rewarded."""
    search: SearchConfig = SearchConfig()
    """Searchers."""
    buffer: BufferConfig = BufferConfig()
    """Replay buffer."""
    objective: ObjectiveConfig = TrajectoryBalanceConfig()
    """Loss."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimisation."""
    sync: SyncConfig = SyncConfig()
    """The two wires."""
    runtime: RuntimeConfig = LocalRuntimeConfig()
    """Processes."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on held-out queries."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept for resuming."""

    @model_validator(mode="after")
    def _policy_is_named(self) -> Self:
        if self.model.model_name_or_path is None and self.model.build is None:
            raise ValueError(
                "no policy is named: set model.model_name_or_path to a Hugging Face folder or name "
                "(or model.build for a small model from random weights)"
            )
        return self

    @model_validator(mode="after")
    def _alphabet_covers_the_task(self) -> Self:
        if self.model.build is None or not isinstance(self.task, ArithmeticTaskConfig):
            return self
        missing = "".join(sorted(self.task.characters() - set(self.model.build.characters)))
        if missing:
            raise ValueError(
                f"model.build.characters is {self.model.build.characters!r}, but the task also "
                f"writes {missing!r}: add it"
            )
        return self

    @model_validator(mode="after")
    def _pairs_are_in_rows(self) -> Self:
        has_rows = isinstance(self.task, CustomTaskConfig | PreferenceTaskConfig)
        if self.buffer.given == "pairs" and not has_rows:
            raise ValueError(
                f"buffer.given is pairs, but the task {self.task.kind} has no rows with "
                "columns chosen and rejected: set task.kind to custom or preference, or leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _attacks_are_not_demonstrated(self) -> Self:
        if not isinstance(self.task, RedteamTaskConfig):
            return self
        given = self.buffer.given == "demonstrations"
        if self.warm_start.steps > 0 or (given and self.search.searchers == 0):
            raise ValueError(
                "the task redteam has no demonstrations to imitate: fine-tune the attacker "
                "first, by tba sft with --task.kind custom on a file of attacks (prompt and "
                "completion), and give the result as model.model_name_or_path"
            )
        if given and self.task.train_file is None:
            raise ValueError(
                "buffer.given is demonstrations, but the task redteam has no attacks to give: set "
                "task.train_file (rows with prompt and completion) in the place of "
                "task.attack_prompt, or leave buffer.given out"
            )
        return self

    @model_validator(mode="after")
    def _attacks_are_embedded(self) -> Self:
        embedded = isinstance(self.task, RedteamTaskConfig) and self.task.embedder is not None
        if isinstance(self.buffer.near_duplicates, NearByCosine) and not embedded:
            raise ValueError(
                "buffer.near_duplicates.kind is cosine, which compares sentence embeddings, but "
                "there is no task.embedder: set it (task.kind redteam has one), or choose "
                "edit_distance"
            )
        return self

    @model_validator(mode="after")
    def _something_can_be_learned_from(self) -> Self:
        if self.search.searchers > 0:
            return self
        if self.buffer.given == "nothing":
            raise ValueError(
                "search.searchers is 0, so there would be nothing to learn from: set it to 1 or "
                "more, or give answers and set buffer.given to pairs or demonstrations"
            )
        alone = isinstance(self.objective, SftConfig | CustomObjectiveConfig)
        if self.buffer.given == "demonstrations" and not alone:
            raise ValueError(
                "buffer.given is demonstrations and search.searchers 0, so that a query has one "
                f"answer, and objective.kind {self.objective.kind} has nothing to compare it with: "
                "set objective.kind to sft, or search.searchers to 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _sft_imitates_what_is_right(self) -> Self:
        if not isinstance(self.objective, SftConfig):
            return self
        if self.buffer.given == "pairs":
            raise ValueError(
                "objective.kind is sft, which imitates every answer, but buffer.given is pairs, of "
                "which one was rejected: set buffer.given to demonstrations, or objective.kind to "
                "dpo"
            )
        if self.search.temperature != 1:
            raise ValueError(
                f"search.temperature is {self.search.temperature}, by which objective.kind sft "
                "would divide the logits of what it imitates: set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _nobody_waits_for_nobody(self) -> Self:
        if self.search.searchers > 0:
            return self
        if self.sync.mode != "free":
            raise ValueError(
                f"sync.mode is {self.sync.mode}, in which the trainer waits for searchers, but "
                "search.searchers is 0: set sync.mode to free"
            )
        bound, last = self.buffer.max_staleness, self.trainer.steps - 1
        if bound is not None and bound < last:
            raise ValueError(
                f"buffer.max_staleness is {bound}, but search.searchers is 0 and given answers are "
                f"up to {last} versions old: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _searchers_have_a_reward(self) -> Self:
        if (
            self.search.searchers > 0
            and isinstance(self.task, CustomTaskConfig)
            and self.task.train_file is not None
            and not self.task.reward
        ):
            raise ValueError(
                "task.train_file is set but task.reward names no reward function: name at least one"
            )
        return self

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        k, s = self.trainer.samples_per_query, self.search.samples_per_query
        if k < 2 and not isinstance(self.objective, SftConfig):
            raise ValueError(
                f"trainer.samples_per_query (K) is {k}, but objective.kind {self.objective.kind} "
                "compares the samples of a query, and a single one would give no gradient: set it "
                "to 2 or more"
            )
        if k > s:
            raise ValueError(
                f"trainer.samples_per_query (K) is {k} but search.samples_per_query (S) is {s}: "
                "searchers must "
                f"find at least K responses for each query, so set S to {k} or more"
            )
        if k > self.buffer.capacity_per_query:
            raise ValueError(
                f"trainer.samples_per_query (K) is {k} but buffer.capacity_per_query is "
                f"{self.buffer.capacity_per_query}: keep at least K samples of each query"
            )
        return self

    @model_validator(mode="after")
    def _micro_batch_holds_one_query(self) -> Self:
        longest = (
            self.task.max_prompt_length
            + self.trainer.samples_per_query * self.search.max_completion_length
        )
        if self.trainer.micro_batch_tokens < longest:
            raise ValueError(
                f"trainer.micro_batch_tokens is {self.trainer.micro_batch_tokens}, less than one "
                "query can "
                f"need (task.max_prompt_length + K * search.max_completion_length = {longest}): "
                "raise it to "
                f"{longest} or shorten prompts or completions"
            )
        return self

    @model_validator(mode="after")
    def _reference_stays_where_searchers_use_it(self) -> Self:
        if self.sync.reference_reset_every and isinstance(
            self.objective, SubTrajectoryBalanceConfig | AStarPOConfig
        ):
            raise ValueError(
                f"objective.kind is {self.objective.kind} and sync.reference_reset_every "
                f"{self.sync.reference_reset_every}, but what searchers compute for this objective "
                "belongs to the reference they had: leave sync.reference_reset_every out"
            )
        return self

    @model_validator(mode="after")
    def _smoothing_keeps_something(self) -> Self:
        own = self.objective
        if (
            isinstance(own, MleSmoothingConfig)
            and isinstance(self.task, RedteamTaskConfig)
            and own.reward_threshold >= 0
        ):
            raise ValueError(
                f"objective.reward_threshold is {own.reward_threshold:g}, but rewards of "
                "red-teaming are mean log-probabilities, none of them above 0: set it to that of "
                "the probability you mean, such as -0.36 for .7"
            )
        return self

    @model_validator(mode="after")
    def _adapters_rest_on_one_base(self) -> Self:
        if self.model.lora is None:
            return self
        if self.sync.reference_reset_every:
            raise ValueError(
                "model.lora is set and sync.reference_reset_every "
                f"{self.sync.reference_reset_every}, but searchers add the adapter to the first "
                "reference: leave sync.reference_reset_every out, or train all weights "
                "(--model.lora none)"
            )
        if isinstance(self.objective, A3CConfig):
            raise ValueError(
                "model.lora is set, but with objective.kind a3c searchers compute gradients, and "
                "they hold no adapter layers: choose another objective, or train all weights "
                "(--model.lora none)"
            )
        return self

    @model_validator(mode="after")
    def _gradients_can_be_sent(self) -> Self:
        if not isinstance(self.objective, A3CConfig):
            return self
        reason = "but with objective.kind a3c searchers send gradients"
        if self.sync.mode != "free":
            raise ValueError(
                f"sync.mode is {self.sync.mode}, {reason}, for which nobody waits: set it to free"
            )
        if self.search.precision != "float32":
            raise ValueError(
                f"search.precision is {self.search.precision}, {reason}, which they compute with "
                "their own weights: set it to float32"
            )
        unused = {"max_staleness": None, "max_reuse": None, "given": "nothing"}
        for name, default in unused.items():
            if (value := getattr(self.buffer, name)) != default:
                raise ValueError(
                    f"buffer.{name} is {value}, {reason}, and nothing is drawn from the "
                    "buffer: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _staleness_can_be_met(self) -> Self:
        bound, k = self.buffer.max_staleness, self.sync.sync_every
        oldest = {"lockstep": k - 1, "barrier": 2 * k - 1, "free": k}[self.sync.mode]
        if bound is not None and bound < oldest:
            raise ValueError(
                f"buffer.max_staleness is {bound}, but with sync.mode {self.sync.mode} and "
                f"sync.sync_every {k} "
                f"fresh samples are up to {oldest} versions old: set it to {oldest} or more, or "
                "sync more often"
            )
        return self
