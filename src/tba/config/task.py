"""What is asked, and how an answer is rewarded."""

from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tba.config.base import Section, Temperature


class TaskBase(Section):
    """Settings that every task has."""

    chat: bool = False
    """Renders the prompt as a user message through the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message in front of a chat prompt."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens; longer ones are counted and skipped."""
    reward_timeout_s: PositiveFloat = 10.0
    """Longest time a reward function may take for one response, in seconds; then it is killed."""


class GradedTaskBase(TaskBase):
    """Settings of a task in which a response is right or wrong."""

    pass_threshold: float = 1.0
    """A response with at least this reward counts as correct in pass@1."""


class ArithmeticTaskConfig(GradedTaskBase):
    """Sums, differences or products of two numbers, with an exact-answer reward."""

    kind: Literal["arithmetic"] = "arithmetic"
    """Task kind."""
    operators: tuple[Literal["+", "-", "*"], ...] = ("+",)
    """Operations asked for."""
    left: tuple[NonNegativeInt, NonNegativeInt] = (0, 999)
    """Smallest and largest left operand."""
    right: tuple[NonNegativeInt, NonNegativeInt] = (0, 999)
    """Smallest and largest right operand."""
    prompt_template: str = "{a}{op}{b}="
    """The question; {a}, {op} and {b} stand for the operands and the operator."""
    answer_prefix: str = ""
    """How the answer begins, given to the policy as part of the prompt; takes the same
    placeholders."""
    train_queries: PositiveInt = 20_000
    """Questions to train on."""
    test_queries: PositiveInt = 1_000
    """Held-out questions; none of them is among the training questions."""
    split_seed: NonNegativeInt = 0
    """Seed of the split into training and held-out questions."""

    def characters(self) -> set[str]:
        """Return the characters that questions and answers are made of."""
        texts = (self.prompt_template, self.answer_prefix)
        parts = [text for t in texts for text, *_ in Formatter().parse(t)]
        can_be_negative = "-" in self.operators and self.left[0] < self.right[1]
        return set("0123456789").union(*self.operators, *parts, "-" if can_be_negative else "")

    @model_validator(mode="after")
    def _enough_questions(self) -> Self:
        for name, (low, high) in (("left", self.left), ("right", self.right)):
            if low > high:
                raise ValueError(
                    f"task.{name} is [{low}, {high}]: the first number must not be the larger"
                )
        space = (
            (self.left[1] - self.left[0] + 1)
            * (self.right[1] - self.right[0] + 1)
            * len(self.operators)
        )
        if space >= 2**63:
            raise ValueError(
                "task.left and task.right allow more different questions than can be numbered: "
                "narrow them"
            )
        asked = self.train_queries + self.test_queries
        if asked > space:
            raise ValueError(
                f"task.train_queries + task.test_queries is {asked}, but the operands allow only "
                f"{space} "
                "different questions: ask for fewer or widen task.left and task.right"
            )
        return self


class Gsm8kTaskConfig(GradedTaskBase):
    """Word problems from JSONL files with `question` and `answer` (ending in `#### n`)."""

    kind: Literal["gsm8k"] = "gsm8k"
    """Task kind."""
    train_file: Path
    """JSONL file of training problems."""
    test_file: Path
    """JSONL file of held-out problems."""
    prompt_template: str = "{question}\nThink step by step and end with: #### answer"
    """The question as the policy sees it: plain, paper, boxed or tags (docs/grading.md), or a text
    in which {question} stands for the problem."""


class MathTaskConfig(GradedTaskBase):
    """Problems with a final answer, graded as mathematics (docs/grading.md)."""

    kind: Literal["math"] = "math"
    """Task kind."""
    train_file: Path
    """Training problems, json, jsonl, csv or parquet: `problem` or `question`, and `answer` or a
    `solution` whose last \\boxed{...} is the answer."""
    test_file: Path
    """Held-out problems in the same form."""
    prompt_template: str = "boxed"
    """The problem as the policy sees it: plain, paper, boxed or tags (docs/grading.md), or a text
    in which {problem} stands for it."""


class GymTaskConfig(GradedTaskBase):
    """A data set of the library reasoning-gym by name, scored by the library (extra `gym`)."""

    kind: Literal["gym"] = "gym"
    """Task kind."""
    dataset: str
    """Name of the data set, such as chain_sum."""
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Options of the data set, such as task.options.max_terms = 4; the others keep their
    defaults."""
    train_queries: PositiveInt = 2_000
    """Questions to train on."""
    test_queries: PositiveInt = 200
    """Held-out questions; none of them is among the training questions."""
    split_seed: NonNegativeInt = 0
    """Seed that the questions are made from."""
    prompt_template: str = "tags"
    """The question as the policy sees it: plain, paper, boxed or tags (docs/grading.md), or a text
    in which {question} stands for it."""

    @model_validator(mode="after")
    def _no_none(self) -> Self:
        _refuse_none(self.options, "task.options")
        return self


def _refuse_none(options: dict[str, Any], name: str) -> None:
    """Refuse what no configuration file can say."""
    for key, value in options.items():
        if value is None or (isinstance(value, list) and None in value):
            raise ValueError(
                f"{name}.{key} is {'none' if value is None else value}, which TOML cannot say: "
                "leave the option out"
            )
        if isinstance(value, dict):
            _refuse_none(value, f"{name}.{key}")


class VerifiersTaskConfig(GradedTaskBase):
    """A single-turn environment of the library verifiers (extra `verifiers`, docs/verifiers.md)."""

    kind: Literal["verifiers"] = "verifiers"
    """Task kind."""
    chat: bool = True
    """Renders prompts through the tokenizer's chat template; false: gives a prompt that is a
    single user message as plain text."""
    environment: str
    """Name of the environment's installed package, as the library takes it."""
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Options of its task set, such as task.options.split = "train"; the others keep their
    defaults."""
    test_options: dict[str, Any] | None = None
    """Options that are different for held-out queries, such as task.test_options.split = "test";
    without any, held-out queries are drawn from the tasks to train on, and taken out of them."""
    train_queries: PositiveInt | None = None
    """Most queries to train on; by default all. Needed where the environment makes tasks without
    end."""
    test_queries: PositiveInt = 200
    """Held-out queries, at most so many where task.test_options is set."""
    split_seed: NonNegativeInt = 0
    """Seed of the order in which queries are drawn."""

    @model_validator(mode="after")
    def _no_none(self) -> Self:
        _refuse_none(self.options, "task.options")
        _refuse_none(self.test_options or {}, "task.test_options")
        return self


class CustomTaskConfig(GradedTaskBase):
    """A task of one's own: rows with a `prompt`, and reward functions in TRL's form."""

    kind: Literal["custom"] = "custom"
    """Task kind."""
    file: Path | None = None
    """Python file that defines `train_rows()`, `test_rows()` and `reward(...)`."""
    train_file: Path | None = None
    """Training rows: json, jsonl, csv or parquet with a prompt column."""
    test_file: Path | None = None
    """Held-out rows in the same form; without it, `test_share` of the training rows is held out."""
    test_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training rows held out when there is no `test_file`."""
    reward: tuple[str, ...] = ()
    """Reward functions: a short name, a dotted path (`package.module:function`) or
    `file.py:function`. Without one nothing can be searched or evaluated."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward function in the sum; all 1 when empty."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.train_file is None):
            raise ValueError(
                "a custom task takes its rows either from task.file (a Python file) or from "
                "task.train_file "
                "(a data file): set exactly one of them"
            )
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(
                f"task.reward_weights has {len(self.reward_weights)} numbers for "
                f"{len(self.reward)} reward "
                "functions: give one weight for each"
            )
        return self


class PreferenceTaskConfig(TaskBase):
    """Prompts and a reward model of what people prefer; nothing is right or wrong."""

    kind: Literal["preference"] = "preference"
    """Task kind."""
    train_file: Path
    """Training rows: json, jsonl, csv or parquet with a prompt column."""
    test_file: Path | None = None
    """Held-out rows in the same form; without it, `test_share` of the training rows is held out."""
    test_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training rows held out when there is no `test_file`."""
    reward_model: str | None = None
    """Folder or hub name of the sequence-classification model that rewards responses."""
    reward: tuple[str, ...] = ()
    """Instead of a reward model, reward functions, whose sum is the reward: short names, dotted
    paths (`package.module:function`) or `file.py:function`."""
    reward_label: str | None = None
    """Label of a reward model with several, whose log-probability is the reward."""
    reward_timeout_s: PositiveFloat = 120.0
    """Longest time for the rewards of one search batch, and then for one response, in seconds; then
    the scoring process is killed."""
    missing_eos_penalty: float | None = None
    """Reward, in the place of the model's, of a response cut at the longest length; the paper has
    -1."""
    judge: str | None = None
    """The gold judge, which evaluations ask and training does not: folder or hub name of a reward
    model, or a function (`package.module:function`, `file.py:function`)."""
    judge_label: str | None = None
    """Label of a judge with several, whose log-probability is its score."""
    judge_timeout_s: PositiveFloat = 600.0
    """Longest time for the judge's scores of 64 responses, in seconds."""
    scored_text: str = "{prompt}{completion}"
    """What reward model and judge read of prompts that are plain text."""
    scoring_device: str = "auto"
    """Device of reward model and judge: auto, cpu, cuda or cuda:N; auto is that of the policy whose
    responses are scored, so each searcher's GPU has a reward model."""
    scoring_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of reward model and judge."""

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        if (self.reward_model is None) == (not self.reward):
            raise ValueError(
                "a preference task is rewarded either by task.reward_model (a folder or hub name) "
                "or by task.reward (functions): set exactly one of them"
            )
        for label, model in (("reward_label", "reward_model"), ("judge_label", "judge")):
            if getattr(self, label) is not None and getattr(self, model) is None:
                raise ValueError(
                    f"task.{label} is {getattr(self, label)}, but there is no task.{model} whose "
                    f"label it could be: set task.{model} or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _text_is_a_template(self) -> Self:
        try:
            self.scored_text.format(prompt="", completion="")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"task.scored_text is {self.scored_text!r}, but the only placeholders are "
                "{prompt} and {completion}: write other braces double"
            ) from error
        return self


class RedteamTaskConfig(TaskBase):
    """Attacks on a victim of one's own: prompts whose answers a classifier finds harmful.

    The policy writes an attack, the victim answers it several times, the reward is the mean
    log-probability of harm that the classifier gives the answers.
    """

    kind: Literal["redteam"] = "redteam"
    """Task kind."""
    attack_prompt: str | None = None
    """The one text that every attack continues."""
    train_file: Path | None = None
    """Several of them instead: json, jsonl, csv or parquet with a prompt column, each prompt asked
    once; the attacks in a column completion start the buffer where buffer.given is
    demonstrations."""
    victim: str
    """Folder or hub name of the causal language model that is tested."""
    victim_template: str = "{attack}"
    """What the victim is asked; {attack} stands for the attack, white space around it aside."""
    victim_chat: bool = False
    """Renders that as a user message through the victim's chat template."""
    victim_samples: PositiveInt = 5
    """Answers sampled to each attack."""
    victim_max_tokens: PositiveInt = 30
    """Longest answer in tokens."""
    victim_temperature: Temperature = 0.7
    """Divides the victim's logits."""
    victim_top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples the victim's tokens from the fewest that have this share of the probability together
    (Lee et al.: .92)."""
    victim_batch: PositiveInt = 64
    """Attacks answered at a time."""
    classifier: str
    """What finds answers harmful: folder or hub name of a sequence classifier, or of a causal model
    that judges a chat by its first word (Llama Guard); or a function from texts to probabilities,
    `package.module:function` or `file.py:function`."""
    classifier_label: str | None = None
    """The classifier's label for harm, or the first word by which a causal one says so; not
    needed with a function or a single label."""
    classifier_opening: str = ""
    """How the judgement of a causal classifier begins, before its first word."""
    min_length: PositiveInt = 5
    """Attacks of fewer tokens, the end-of-sequence token included, and blank ones get the lowest
    reward, and the victim is not asked."""
    min_probability: float = Field(default=1e-8, gt=0, lt=1)
    """Smaller probabilities count as this one, whose logarithm is the lowest reward."""
    embedder: str | None = None
    """Folder or hub name of a sentence encoder (mean pooling), such as all-MiniLM-L6-v2; with one
    an evaluation tells the diversity of the attacks."""
    scoring_device: str = "auto"
    """Where victim, classifier and encoder are: auto, cpu, cuda or cuda:N; auto is the device of
    the attacker that is scored, so each searcher's GPU has a victim."""
    scoring_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of victim and classifier."""
    reward_timeout_s: PositiveFloat = 600.0
    """Longest time for the attacks of one search batch, in seconds; then scoring starts anew."""
    loading_timeout_s: PositiveFloat = 600.0
    """Longest time to load victim and classifier, in seconds."""

    @model_validator(mode="after")
    def _one_source_of_prompts(self) -> Self:
        if (self.attack_prompt is None) == (self.train_file is None):
            raise ValueError(
                "attacks continue either task.attack_prompt or the prompts of task.train_file: set "
                "exactly one of them"
            )
        return self

    @model_validator(mode="after")
    def _the_victim_sees_the_attack(self) -> Self:
        fields = [name for _, name, *_ in Formatter().parse(self.victim_template)]
        if [name for name in fields if name is not None] != ["attack"]:
            raise ValueError(
                f"task.victim_template is {self.victim_template!r}, expected a text with "
                "{attack} in it once, and no other placeholder: write other braces double"
            )
        return self


TaskConfig = Annotated[
    ArithmeticTaskConfig
    | Gsm8kTaskConfig
    | MathTaskConfig
    | GymTaskConfig
    | VerifiersTaskConfig
    | CustomTaskConfig
    | PreferenceTaskConfig
    | RedteamTaskConfig,
    Field(discriminator="kind"),
]
