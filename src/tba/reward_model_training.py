"""Trains a Bradley-Terry reward model from pairs: which of two completions to a prompt is better.

    loss     -log sigmoid(r(x, y_chosen) - r(x, y_rejected)), mean over the pairs of a batch

A policy's weights, such as the SFT model's, get a new head of one logit; the result is an ordinary
Hugging Face folder, which `task.reward_model` and `task.judge` take. Texts are read exactly as
the reward model reads them later (`tba.tasks.reward_model.Reader`), which is one reason for a
trainer of our own; the other is that TRL's RewardTrainer would bring accelerate and datasets along.

Memory is bounded: a batch is computed in parts of at most `TOKENS_A_PASS` padded tokens (one pair
at least). The order of pairs and the new head depend on the seed alone.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tba.config.reward_model import RewardModelConfig
from tba.config.training import CosineRate
from tba.errors import DataError, DivergedError, ModelError
from tba.policy.loading import checked_source, is_local, loading_errors, switch_off_dropout
from tba.policy.precision import autocast_dtype
from tba.run.durable import new_folder, storage_errors
from tba.runtimes.resources import pick_device
from tba.schedules import learning_rate_at
from tba.tasks.answers import read_pairs
from tba.tasks.custom import hold_out
from tba.tasks.reward_model import Reader, logits_of, longest_text
from tba.tasks.rows import read_rows, recognise

log = logging.getLogger(__name__)

TOKENS_A_PASS = 16_384
"""Padded tokens of both completions in one forward and backward pass."""
MAX_GRAD_NORM = 1.0
_WARMUP_SHARE = 10
"""One step in so many belongs to the linear warm-up."""
_ADAM_BETA2 = 0.98

Text = Sequence[int]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PairTokens:
    """A pair as the reward model reads it."""

    chosen: Text
    """Tokens of the prompt with the better completion."""
    rejected: Text
    """With the worse one."""

    @property
    def width(self) -> int:
        """Tokens of the longer text."""
        return max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How a reward model orders pairs that it has not learned from."""

    accuracy: float
    """Share in which the chosen completion has the higher reward; a tie counts half."""
    loss: float
    """Mean loss."""
    mean: float
    """Mean reward of all completions."""
    std: float
    """Standard deviation of these rewards."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What training came to."""

    steps: int
    """Optimiser steps."""
    before: HeldOut
    """With the new head as it was."""
    after: HeldOut
    """At the end."""


def train_reward_model(
    files: Sequence[Path], config: RewardModelConfig, *, out: Path, tell: Tell
) -> Trained:
    """Train on the pairs of data files, measure on held-out ones, and write the model to a folder.

    Args:
        files: Rows with `prompt`, `chosen` and `rejected`.
        config: How to train.
        out: The folder to write.
        tell: Told of progress.

    Raises:
        DataError: A row has no pair, or the tokenizer cannot read it.
        ModelError: The model to start from cannot be used.
        ConfigError: The folder cannot be made.
        DivergedError: A loss is not finite, or all texts have the same reward in the end.
        StorageError: The folder cannot be written.
    """
    rows, test_rows = _rows(files, config)
    device = torch.device(pick_device(config.device))
    model, tokenizer = start_from(config.model, config.seed, device)
    longest = config.max_length or longest_text(model, tokenizer)
    reader = Reader(tokenizer, config.model, longest, chat=config.chat)
    pairs = tokenize_pairs(rows, reader, "the pairs")
    test = tokenize_pairs(test_rows, reader, "the held-out pairs")
    tell(f"{len(pairs)} pairs to learn from, {len(test)} held out")
    low = autocast_dtype(config.precision, model)
    # cached bfloat16 weights would outlive every optimiser step: all of training is in one autocast
    autocast = torch.autocast(device.type, low, enabled=low is not None, cache_enabled=False)
    with new_folder(out, "reward model") as folder:
        with autocast:
            before = measure(model, test)
            steps = _train(model, pairs, config, tell)
            after = measure(model, test)
        if not np.isfinite(after.loss) or after.std == 0:
            raise DivergedError(
                f"the reward model has a loss of {after.loss:g} on held-out pairs and rewards with "
                f"a deviation of {after.std:g}, so it is not written: set a lower --learning-rate"
            )
        with storage_errors(f"reward model {out}"):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return Trained(steps, before, after)


def _rows(
    files: Sequence[Path], config: RewardModelConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on and held-out rows."""
    rows = read_pair_rows(files)
    if config.test_file is not None:
        return rows, read_pair_rows([config.test_file])
    kept, left = hold_out(len(rows), config.test_share, ", ".join(map(str, files)))
    return [rows[i] for i in kept], [rows[i] for i in left]


def read_pair_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows of data files, each with a prompt and a pair.

    Raises:
        DataError: A file or a row cannot be used; the message says why.
    """
    rows = []
    for file in files:
        own = recognise(read_rows(file), str(file))
        pairs = read_pairs(own, str(file))
        rows += [
            {"prompt": row["prompt"], "chosen": pair.chosen, "rejected": pair.rejected}
            for row, pair in zip(own, pairs, strict=True)
        ]
    return rows


def start_from(
    base: str, seed: int, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a language model with a new head of one logit, without dropout, in float32.

    Raises:
        ModelError: It cannot be loaded.
    """
    name = checked_source(base)
    local = is_local(name)
    with loading_errors(name), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # transformers initialises the head from the global generator
        tokenizer = AutoTokenizer.from_pretrained(
            name, truncation_side="left", local_files_only=local
        )
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=1,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=local,
        )
    if inner := [key for key in loading["missing_keys"] if not key.startswith(("score", "class"))]:
        raise ModelError(
            f"The weights in {name} lack {len(inner)} tensors of the model, among them "
            f"{min(inner)}: give a folder saved with save_pretrained."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    switch_off_dropout(model)
    return model.to(device), tokenizer


def tokenize_pairs(rows: Sequence[dict[str, Any]], reader: Reader, source: str) -> list[PairTokens]:
    """Return the pairs as the reward model reads them; those of two equal texts are left out.

    Raises:
        DataError: No pair is left, or the tokenizer does not know a character.
        ModelError: Prompts are messages, and the model has no chat template.
    """
    prompts = [row["prompt"] for row in rows]
    both = (reader.read(prompts, [row[name] for row in rows]) for name in ("chosen", "rejected"))
    pairs = [PairTokens(*pair) for pair in zip(*both, strict=True)]
    kept = [pair for pair in pairs if pair.chosen != pair.rejected]
    if not kept:
        raise DataError(
            f"none of {source} can be learned from: in each of {len(pairs)} rows both completions "
            f"read the same, once cut to {reader.max_length} tokens"
        )
    return kept


def measure(model: PreTrainedModel, pairs: Sequence[PairTokens]) -> HeldOut:
    """Return how a reward model orders pairs."""
    model.eval()
    by_width = sorted(pairs, key=lambda pair: pair.width)
    with torch.inference_mode():
        rewards = torch.cat([_rewards(model, part) for part in _passes(by_width)])
    difference = rewards[:, 0] - rewards[:, 1]
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    return HeldOut(
        accuracy=right.mean().item(),
        loss=-logsigmoid(difference).mean().item(),
        mean=rewards.mean().item(),
        std=rewards.std(correction=0).item(),
    )


def _train(
    model: PreTrainedModel, pairs: Sequence[PairTokens], config: RewardModelConfig, tell: Tell
) -> int:
    """Train in place, and return the steps."""
    model.train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, _ADAM_BETA2), weight_decay=0.0
    )
    batches = list(_batches(len(pairs), config))
    schedule = CosineRate(warmup_steps=len(batches) // _WARMUP_SHARE)
    losses: list[float] = []
    for step, batch in enumerate(batches):
        rate = config.learning_rate * learning_rate_at(schedule, step, len(batches))
        optimiser.param_groups[0]["lr"] = rate
        losses.append(_step(model, [pairs[i] for i in batch], optimiser))
        if (step + 1) % max(1, len(batches) // 10) == 0:
            tell(f"step {step + 1}/{len(batches)}: loss {np.mean(losses[-10:]):.4f}")
    return len(batches)


def _step(
    model: PreTrainedModel, batch: Sequence[PairTokens], optimiser: torch.optim.Optimizer
) -> float:
    """Do one optimiser step, and return the mean loss of the batch."""
    total = 0.0
    optimiser.zero_grad()
    for part in _passes(batch):
        rewards = _rewards(model, part)
        loss = -logsigmoid(rewards[:, 0] - rewards[:, 1]).sum() / len(batch)
        loss.backward()
        total += loss.item()
    if not np.isfinite(total):
        raise DivergedError(
            f"the reward model's loss is {total}: set a lower --learning-rate, or look for broken "
            "weights in the base model"
        )
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimiser.step()
    return total


def _rewards(model: PreTrainedModel, pairs: Sequence[PairTokens]) -> Tensor:
    """Return the rewards of chosen and rejected completions; shape [pair, 2]."""
    texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    logits = logits_of(model, texts).float()  # [2 * pair, 1]
    return logits.view(2, len(pairs)).T


def _passes(pairs: Sequence[PairTokens]) -> Iterator[Sequence[PairTokens]]:
    """Part pairs into passes of at most `TOKENS_A_PASS` tokens, a pair at least."""
    first, width = 0, 0
    for last, pair in enumerate(pairs):
        wider = max(width, pair.width)
        if last > first and 2 * wider * (last - first + 1) > TOKENS_A_PASS:
            yield pairs[first:last]
            first, wider = last, pair.width
        width = wider
    yield pairs[first:]


def _batches(count: int, config: RewardModelConfig) -> Iterator[list[int]]:
    """Yield batches of all epochs, each pair once an epoch; the last of one may be short."""
    generator = np.random.default_rng(config.seed)
    for _ in range(config.epochs):
        order = generator.permutation(count).tolist()
        for first in range(0, count, config.batch_size):
            yield order[first : first + config.batch_size]
