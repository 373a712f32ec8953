"""Classifiers that say how probable it is that an answer is harmful, in the scoring process.

sequence classifier   the probability of `label`: softmax over the labels, or sigmoid where the
                      model has one label or says that several may hold at once
causal model          reads a chat of attack and answer through its chat template, then
                      `opening`; the probability that `label` begins its judgement (Llama Guard)
function              of one's own, from texts to probabilities; it is given the `attacks`, too,
                      if it has a parameter of that name
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsFloat

import numpy as np
import torch
from transformers import AutoConfig

from tba.config.model import ModelConfig
from tba.errors import UserCodeError
from tba.policy.loading import Policy, load_policy
from tba.policy.reference import Reference
from tba.references import load_function
from tba.tasks.prompts import tokenize
from tba.tasks.reward_model import load_classifier as load_sequence_classifier

Classifier = Callable[[Sequence[str], Sequence[str]], list[float]]
"""Takes attacks and answers, aligned, and returns the probability of harm in each answer."""

BATCH = 64
"""Answers classified at a time by a sequence classifier."""
CAUSAL_BATCH_TOKENS = 16_384
"""Tokens at a time, packed, of the chats that a causal model judges."""


def load_classifier(
    reference: str, label: str | None, opening: str, *, device: torch.device, dtype: torch.dtype
) -> Classifier:
    """Load what `task.classifier` names.

    Raises:
        UserError: It cannot be loaded, or has no such label.
    """
    if ":" in reference:
        return partial(_by_function, load_function(reference, role="classifier"), reference)
    try:
        config = AutoConfig.from_pretrained(reference)
    except (OSError, ValueError) as error:
        raise UserCodeError(
            f"task.classifier {reference} cannot be loaded ({str(error).splitlines()[0]}): give a "
            "folder or hub name, or a function as file.py:function"
        ) from error
    if any(name.endswith("ForCausalLM") for name in config.architectures or ()):
        return _causal(reference, label, opening, device, dtype)
    model, tokenizer = load_sequence_classifier(reference, device=device, dtype=dtype)
    tokenizer.padding_side = "right"
    at = _label_id(reference, label, model.config.id2label)
    return partial(_by_labels, model, tokenizer, at)


def _label_id(reference: str, label: str | None, names: dict[int, str]) -> int:
    """Return the number of the label for harm."""
    if label is None and len(names) == 1:
        return next(iter(names))
    for number, name in names.items():
        if name == label:
            return number
    raise UserCodeError(
        f"task.classifier_label is {label!r}, but {reference} has the labels "
        f"{', '.join(names.values())}: name the one that means harm"
    )


@torch.inference_mode()
def _by_labels(
    model: Any, tokenizer: Any, label: int, attacks: Sequence[str], answers: Sequence[str]
) -> list[float]:
    del attacks  # the answer alone is judged, as in Lee et al.
    several = (
        model.config.problem_type == "multi_label_classification" or len(model.config.id2label) == 1
    )
    found: list[float] = []
    for first in range(0, len(answers), BATCH):
        texts = list(answers[first : first + BATCH])
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        logits = model(**inputs.to(model.device)).logits.float()  # [text, label]
        probabilities = logits.sigmoid() if several else logits.softmax(-1)
        found += probabilities[:, label].tolist()
    return found


def _causal(
    reference: str, label: str | None, opening: str, device: torch.device, dtype: torch.dtype
) -> Classifier:
    judge = load_policy(reference, ModelConfig(), device=device, dtype=dtype)
    words = judge.tokenizer(label or "", add_special_tokens=False)["input_ids"]
    if not words:
        raise UserCodeError(
            f"task.classifier {reference} is a causal model, but task.classifier_label is "
            f"{label!r}: name the word by which it calls an answer harmful, such as unsafe"
        )
    return partial(_by_first_word, judge, words[0], opening)


def _by_first_word(
    judge: Policy, word: int, opening: str, attacks: Sequence[str], answers: Sequence[str]
) -> list[float]:
    chats = [
        [{"role": "user", "content": attack}, {"role": "assistant", "content": answer}]
        for attack, answer in zip(attacks, answers, strict=True)
    ]
    texts = [
        judge.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        + opening
        for chat in chats
    ]
    ids = tokenize(texts, judge.tokenizer, what="an answer", special_tokens=False)
    prompts = [np.array(row, dtype=np.int32) for row in ids]
    first_words = [np.array([word], dtype=np.int32)] * len(prompts)
    model = Reference(judge.model, temperature=1.0, micro_batch_tokens=CAUSAL_BATCH_TOKENS)
    found = model.log_ref(prompts, first_words, np.arange(len(prompts)))
    return [math.exp(log_prob[0]) for log_prob in found]


def _by_function(
    function: Callable[..., Any], name: str, attacks: Sequence[str], answers: Sequence[str]
) -> list[float]:
    takes_attacks = "attacks" in inspect.signature(function).parameters
    more = {"attacks": list(attacks)} if takes_attacks else {}
    found = list(function(list(answers), **more))
    expected = f"expected a probability, 0 to 1, for each of {len(answers)} texts"
    if len(found) != len(answers):
        raise UserCodeError(f"classifier {name} returned {len(found)} values, {expected}")
    for p in found:
        if not _is_probability(p):
            raise UserCodeError(f"classifier {name} returned {p!r:.80}, {expected}")
    return [float(p) for p in found]


def _is_probability(p: Any) -> bool:
    try:
        return isinstance(p, SupportsFloat) and 0 <= float(p) <= 1
    except (TypeError, ValueError):  # such as a row of a tensor
        return False
