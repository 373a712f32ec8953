"""Rewards by a sequence-classification model: a Bradley-Terry reward model, or a classifier.

The reward of a completion y to a prompt x is read off the text of both together.

    one label        its logit, as `tba reward-model` and TRL's RewardTrainer train it
    more labels      the log-probability of the one that is named: log softmax, or log sigmoid where
                     the model's `problem_type` is multi_label_classification

How a text is read, here as in training (`Reader`):

    plain text       `template` filled, then the tokenizer's special tokens, then its
                     end-of-sequence token unless the text ends with it already
    messages         the model's own chat template, with the completion as the assistant's
    too long         the beginning is cut off, so that the completion stays

The padding token may be the end-of-sequence token: transformers takes the logit of the last token
that is not padding, so a text's reward is the same alone and in a batch, whatever pads it.

A `RewardSpec` names `RewardModel` and the scoring process makes it. Only this file and what it
imports need torch there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from tba.errors import DataError, ModelError
from tba.policy.loading import checked_source, is_local, known_positions, loading_errors
from tba.runtimes.resources import pick_device
from tba.tasks.prompts import fill, tokenize
from tba.tasks.rewards import text_of

PLAIN = "{prompt}{completion}"
"""Template of a plain text: the completion follows the prompt."""
_UNBOUNDED = 10**9
"""Some tokenizers state such a length where they have no limit."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns prompts and completions into the tokens that a reward model reads."""

    tokenizer: PreTrainedTokenizerBase
    """The reward model's; truncates on the left."""
    name: str
    """The reward model, for messages."""
    max_length: int | None
    """Most tokens of a text; None: no limit."""
    template: str = PLAIN
    """Of plain texts; one without {prompt} shows the completion alone, of messages too."""
    chat: bool = False
    """Whether a prompt that is a text is a user's message."""

    def read(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        """Return the tokens of each prompt with its completion.

        Raises:
            DataError: The tokenizer does not know a character.
            ModelError: Prompts are messages, and there is no chat template that takes them.
        """
        if not prompts:
            return []
        kinds = {isinstance(prompt, str) for prompt in prompts}
        if len(kinds) > 1:
            raise DataError(
                "some prompts are texts and others lists of messages, but a reward model reads one "
                "form: write all of them alike"
            )
        as_chat = self.chat or not kinds.pop()
        if as_chat and "{prompt}" in self.template:
            texts = [self._chat(p, text_of(c)) for p, c in zip(prompts, completions, strict=True)]
            found = tokenize(texts, self.tokenizer, what="a chat", special_tokens=False)
            return found if self.max_length is None else [ids[-self.max_length :] for ids in found]
        texts = [self._plain(p, text_of(c)) for p, c in zip(prompts, completions, strict=True)]
        stop = self.tokenizer.eos_token_id
        found = tokenize(
            texts,
            self.tokenizer,
            what="a text to reward",
            special_tokens=True,
            max_length=None if self.max_length is None else self.max_length - (stop is not None),
        )
        return [ids if stop is None or ids[-1:] == [stop] else [*ids, stop] for ids in found]

    def _plain(self, prompt: Any, completion: str) -> str:
        return fill(self.template, "the template", {"prompt": prompt, "completion": completion})

    def _chat(self, prompt: Any, completion: str) -> str:
        if self.tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer of {self.name} has no chat template, but prompts are messages: use "
                "a reward model of chats, or give prompts as text"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer = {"role": "assistant", "content": completion}
        try:
            return self.tokenizer.apply_chat_template([*messages, answer], tokenize=False)
        except TemplateError as error:
            raise ModelError(f"the chat template of {self.name} refuses a chat: {error}") from error


class RewardModel:
    """A reward function in TRL's form, made from a folder or hub name."""

    def __init__(
        self,
        name: str,
        *,
        label: str | None = None,
        template: str = PLAIN,
        chat: bool = False,
        max_length: int | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        """Load the model.

        Args:
            name: Folder or hub name of a sequence-classification model with safetensors weights.
            label: Name or number of the label whose log-probability is the reward; None where the
                model has one label.
            template: Of plain texts, with {prompt} and {completion}.
            chat: Whether a prompt that is a text is a user's message.
            max_length: Most tokens of a text; None: what model and tokenizer take.
            batch_size: Texts in a forward pass.
            device: auto, cpu, cuda or cuda:N.
            dtype: Of the weights, such as bfloat16.

        Raises:
            ModelError: The model cannot be used, or has no such label.
        """
        disable_progress_bar()  # it would tear the run's own, which shares standard error
        self._model, tokenizer = load_classifier(
            name, device=torch.device(pick_device(device)), dtype=getattr(torch, dtype)
        )
        self._label = _find_label(name, self._model, label)
        self._batch_size = batch_size
        longest = longest_text(self._model, tokenizer) if max_length is None else max_length
        self._reader = Reader(tokenizer, name, longest, template, chat)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **_: object
    ) -> list[float]:
        """Return the reward of each completion."""
        return self.score(self._reader.read(prompts, completions))

    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each text; those of like length are computed together.

        Args:
            texts: Tokens of each, shape [token].
        """
        rewards = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        for first in range(0, len(texts), self._batch_size):
            rows = order[first : first + self._batch_size]
            with torch.inference_mode():
                logits = logits_of(self._model, [texts[row] for row in rows]).float()
            for row, reward in zip(rows, self._rewards(logits).tolist(), strict=True):
                rewards[row] = reward
        return rewards

    def _rewards(self, logits: Tensor) -> Tensor:
        """Return the rewards of logits of shape [text, label]; shape [text]."""
        if self._label is None:
            return logits[:, 0]
        if self._model.config.problem_type == "multi_label_classification":
            return logsigmoid(logits)[:, self._label]
        return logits.log_softmax(dim=-1)[:, self._label]


def load_classifier(
    name: str, *, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence-classification model for inference, and its tokenizer.

    Raises:
        ModelError: The folder is missing or incomplete, or is no such model's.
    """
    name = checked_source(name)
    local = is_local(name)
    with loading_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(
            name, truncation_side="left", local_files_only=local
        )
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=local,
        )
    if missing := loading["missing_keys"]:
        raise ModelError(
            f"The weights in {name} lack {len(missing)} tensors of a sequence-classification "
            f"model, among them {min(missing)}: it is no reward model; train one by tba "
            "reward-model."
        )
    return model.to(device).eval(), tokenizer


def longest_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most tokens that model and tokenizer take; None where neither has a limit."""
    positions = known_positions(model)
    limits = [n for n in (positions, tokenizer.model_max_length) if n and n < _UNBOUNDED]
    return min(limits, default=None)


def logits_of(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of texts, each as if it were alone; shape [text, label].

    Texts are padded on the right. A model without a padding token is given one that none of them
    ends with, since transformers finds the end of a text by it.
    """
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        ends = {text[-1] for text in texts}
        pad = next(token for token in range(len(ends) + 1) if token not in ends)
        config.pad_token_id = pad
        try:
            return _padded_logits(model, texts, pad)
        finally:
            config.pad_token_id = None
    return _padded_logits(model, texts, config.pad_token_id)


def _padded_logits(model: PreTrainedModel, texts: Sequence[Sequence[int]], pad: int) -> Tensor:
    width = max(len(text) for text in texts)
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    device = model.device
    return model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits


def _find_label(name: str, model: PreTrainedModel, label: str | None) -> int | None:
    """Return the number of a label; None where the model has one, whose logit is the reward."""
    labels: Mapping[int, str] = model.config.id2label
    told = ", ".join(labels.values())
    if model.config.num_labels == 1:
        if label is not None:
            raise ModelError(
                f"the label {label!r} is asked for, but {name} has one only, whose logit is the "
                "reward: leave the label out"
            )
        return None
    if label is None:
        raise ModelError(
            f"{name} is a classifier with the labels {told}: name the label whose log-probability "
            "is the reward"
        )
    known = {text: number for number, text in labels.items()}
    number = int(label) if label.isdecimal() and label not in known else known.get(label)
    if number not in labels:
        raise ModelError(f"{name} has no label {label!r}: choose one of {told}")
    return number
