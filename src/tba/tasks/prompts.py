"""Turns rows into queries: fills templates, renders chats, tokenizes, skips what is too long."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from tba.config.task import TaskBase
from tba.errors import ConfigError, DataError, ModelError
from tba.records import Query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def fill(template: str, setting: str, values: Mapping[str, Any]) -> str:
    """Put the values in the place of `{name}` in a template.

    Raises:
        ConfigError: The template, which is the value of `setting`, has another placeholder.
    """
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        allowed = ", ".join(f"{{{name}}}" for name in values)
        raise ConfigError(
            f"{setting} is {template!r}, but the only placeholders are {allowed}: "
            "write other braces double"
        ) from error


def make_queries(
    rows: Sequence[Mapping[str, Any]],
    config: TaskBase,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    name: str,
    prefixes: Sequence[str] | None = None,
) -> tuple[list[Query], list[int]]:
    """Return the queries of the rows that are short enough, and the positions of these rows.

    Args:
        rows: Each with `prompt`; all columns go to the reward functions.
        config: Says whether prompts are rendered as a chat; lists of messages always are.
        tokenizer: The policy's.
        name: What the rows are, for error messages.
        prefixes: How each answer begins: it follows the prompt and belongs to it.

    Raises:
        ConfigError: A system prompt is set, but prompts are plain text.
        DataError: No row is short enough.
        ModelError: A chat is asked for and the tokenizer cannot render it.
    """
    chat = config.chat or any(isinstance(row["prompt"], list) for row in rows)
    if config.system_prompt is not None and not chat:
        raise ConfigError(
            "task.system_prompt is set, but prompts are plain text: set task.chat to true"
        )
    texts = (
        render([r["prompt"] for r in rows], tokenizer, system_prompt=config.system_prompt)
        if chat
        else [r["prompt"] for r in rows]
    )
    if prefixes is not None:
        texts = [text + prefix for text, prefix in zip(texts, prefixes, strict=True)]
    # A chat template writes its special tokens itself; adding them would double the first one.
    _check_unicode(texts)
    ids = tokenize(texts, tokenizer, what="a prompt", special_tokens=not chat)
    kept = [i for i, tokens in enumerate(ids) if 0 < len(tokens) <= config.max_prompt_length]
    if not any(ids):
        raise DataError(f"every one of the {len(rows)} prompts of {name} is empty: write something")
    if not kept:
        raise DataError(
            f"every one of the {len(rows)} prompts of {name} is longer than task.max_prompt_length "
            f"= {config.max_prompt_length} tokens (the shortest has {min(map(len, ids))}): raise it"
        )
    queries = [
        Query(new, texts[old], np.asarray(ids[old], dtype=np.int32), dict(rows[old]))
        for new, old in enumerate(kept)
    ]
    return queries, kept


def tokenize(
    texts: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    what: str,
    special_tokens: bool,
    max_length: int | None = None,
) -> list[list[int]]:
    """Return the tokens of each text, cut at the tokenizer's truncation side to the given length.

    Raises:
        DataError: The tokenizer does not know a character; `what` says what the texts are.
    """
    try:
        return tokenizer(
            texts,
            add_special_tokens=special_tokens,
            truncation=max_length is not None,
            max_length=max_length,
        )["input_ids"]
    except Exception as error:
        # tokenizers, written in Rust, reports an unknown character by a bare Exception.
        if type(error) is not Exception:
            raise
        unread = next(text for text in texts if not _is_read(text, tokenizer))
        raise DataError(
            f"the tokenizer cannot read {what}, {unread!r:.80} ({error}): use a policy whose "
            "tokenizer knows its characters (a built one has those of model.build.characters)"
        ) from error


def _is_read(text: str, tokenizer: "PreTrainedTokenizerBase") -> bool:
    try:
        tokenizer(text)
    except Exception as error:
        if type(error) is not Exception:
            raise
        return False
    return True


def _check_unicode(prompts: Sequence[str]) -> None:
    for number, text in enumerate(prompts, start=1):
        if not is_unicode(text):
            raise DataError(
                f"prompt {number} ({text!r:.80}) holds half a surrogate pair: repair it"
            )


def is_unicode(text: str) -> bool:
    """Say whether a text can be written down: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def render(
    prompts: Sequence[Any],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    system_prompt: str | None = None,
) -> list[str]:
    """Render texts, or lists of messages, through a tokenizer's chat template.

    Raises:
        ModelError: It has none, or the template refuses a prompt.
    """
    if tokenizer.chat_template is None:
        raise ModelError(
            "the tokenizer has no chat template, but the task asks for chat prompts: use an "
            "instruction-tuned model, or set task.chat to false and give prompts as text"
        )
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    chats = [
        system + ([{"role": "user", "content": p}] if isinstance(p, str) else p) for p in prompts
    ]
    try:
        return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ModelError(
            f"the tokenizer's chat template refuses a prompt of the task: {error}"
        ) from error
