"""Red-teaming: the policy writes attacks on a victim, and a classifier judges the answers.

This is a tool to test one's own models with before others do (`docs/redteam.md`).

    query      the text that an attack continues
    response   the attack
    reward     mean over the victim's answers of log p(harm), `tba.tasks.redteam_reward`
    measures   attack success and diversity, `tba.tasks.redteam_measures`

The prompts of a file are asked once each, however many rows share one. The completions of these
rows, the attacks that an attacker was fine-tuned on, are examples: where they are asked for they
start the buffer (`tba.given`), with the reward that they have from this victim.
"""

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.config.search import Given
from tba.config.task import RedteamTaskConfig
from tba.records import Query
from tba.tasks.answers import read_demonstrations
from tba.tasks.base import Measure, RewardSpec, Task
from tba.tasks.prompts import make_queries
from tba.tasks.redteam_measures import Diversity, attack_success
from tba.tasks.rows import Row, read_rows, recognise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_ATTACKS = 4_096
"""Attacks that an evaluation may ask for, by `evaluation.queries`."""
REWARD = "tba.tasks.redteam_reward:AttackReward"


def load_redteam(
    config: RedteamTaskConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    given: Given = "nothing",
    embeddings: bool = False,
) -> Task:
    """Make the queries; evaluations ask them in turn, since it is attacks that they are about.

    Raises:
        UserError: The prompts cannot be used, or a row has no attack where these are wanted.
    """
    source = str(config.train_file or "task.attack_prompt")
    rows = _rows(config)
    attacks = read_demonstrations(rows, source) if given == "demonstrations" else None
    sharing = _by_prompt(rows)
    train, kept = make_queries([rows[own[0]] for own in sharing], config, tokenizer, name=source)
    asked = enumerate(islice(cycle(train), max(MOST_ATTACKS, len(train))))
    measures: tuple[Measure, ...] = (attack_success,)
    if config.embedder is not None:
        measures += (Diversity(config.embedder, config.scoring_device),)
    return Task(
        train=train,
        test=[Query(number, q.prompt, q.prompt_ids, q.columns) for number, q in asked],
        reward=reward_spec(config, embeddings=embeddings),
        pass_threshold=None,
        demonstrations=None,
        skipped=len(sharing) - len(train),
        examples=None if attacks is None else [[attacks[i] for i in sharing[at]] for at in kept],
        measures=measures,
    )


def reward_spec(config: RedteamTaskConfig, *, embeddings: bool) -> RewardSpec:
    """Return how attacks are scored, by a victim and a classifier in the scoring process.

    With embeddings, the sentence encoder is there, too.
    """
    classifier = config.classifier
    if classifier.rpartition(":")[0].endswith(".py"):
        path, _, function = classifier.rpartition(":")
        classifier = f"{Path(path).resolve()}:{function}"
    options: dict[str, Any] = {
        "victim": {
            "name": config.victim,
            "template": config.victim_template,
            "chat": config.victim_chat,
            "samples": config.victim_samples,
            "max_tokens": config.victim_max_tokens,
            "temperature": config.victim_temperature,
            "top_p": config.victim_top_p,
            "batch": config.victim_batch,
        },
        "classifier": {
            "reference": classifier,
            "label": config.classifier_label,
            "opening": config.classifier_opening,
        },
        "embedder": config.embedder if embeddings else None,
        "min_length": config.min_length,
        "min_probability": config.min_probability,
        "device": config.scoring_device,
        "dtype": config.scoring_dtype,
    }
    return RewardSpec(
        functions=(REWARD,),
        weights=(1.0,),
        timeout_s=config.reward_timeout_s,
        options=(options,),
        start_timeout_s=config.loading_timeout_s,
        setting=f"task.victim ({config.victim}) with task.classifier ({config.classifier})",
    )


def _rows(config: RedteamTaskConfig) -> list[Row]:
    if config.train_file is None:
        return [{"prompt": config.attack_prompt}]
    return recognise(read_rows(config.train_file), str(config.train_file))


def _by_prompt(rows: Sequence[Row]) -> list[list[int]]:
    """Return the positions of the rows of each prompt, in the order of its first."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(json.dumps(row["prompt"], sort_keys=True, default=str), []).append(number)
    return list(found.values())
