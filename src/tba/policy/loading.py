"""Loading a policy from a Hugging Face folder or hub name, or saying in a sentence why not."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tba.config.model import ModelConfig
from tba.errors import ConfigError, ModelError
from tba.policy.agreement import check_agreement
from tba.policy.attention import ATTENTION, register_attention
from tba.records import Query

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ATTENTION = {"full_attention", "sliding_attention"}

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    ImportError,
    TypeError,
    AttributeError,
    IndexError,
    StrictDataclassError,
)
"""What transformers raises over folders that are none, or damaged ones."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model and what turns text into its tokens and back."""

    model: PreTrainedModel
    """On its device, without dropout; in training mode only for gradient checkpointing."""
    tokenizer: PreTrainedTokenizerBase
    """Pads on the left; has a padding token, which may be the end-of-sequence token."""
    eos_ids: tuple[int, ...]
    """Tokens that end a response; the tokenizer's own comes first."""


def load_policy(
    name: str | Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> Policy:
    """Load model and tokenizer; `generation_config.json` gives its end-of-sequence ids, no more.

    Raises:
        ModelError: The folder is missing or incomplete, its weights are not readable safetensors,
            its tokenizer has no end-of-sequence token, or its family computes something else on
            packed tokens than by itself.
    """
    name = checked_source(str(name))
    options = {"trust_remote_code": config.trust_remote_code, "local_files_only": is_local(name)}
    with loading_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
        model, loading = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if missing := loading["missing_keys"]:
        raise ModelError(
            f"The weights in {name} lack {len(missing)} tensors of the model, among them "
            f"{min(missing)}: give a folder saved with save_pretrained."
        )
    _check_layers(name, model)
    _set_attention(name, model)
    switch_off_dropout(model)
    model = model.to(device).eval()
    check_agreement(name, model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    eos_ids = _eos_ids(name, model, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Policy(model=model, tokenizer=tokenizer, eos_ids=eos_ids)


def is_local(name: str) -> bool:
    """Return whether a model is to be looked for on this machine alone."""
    return constants.HF_HUB_OFFLINE or Path(name).is_dir()


@contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Turn what transformers raises over a damaged model into a `ModelError` that names it."""
    try:
        yield
    except SafetensorError as error:
        raise ModelError(
            f"The weights in {name} are not readable safetensors ({error}): the file is truncated "
            "or damaged, copy it again."
        ) from error
    except _UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = name if Path(name).is_dir() else f"{name}, which is no folder here"
        raise ModelError(f"No model could be loaded from {where}: {reason}") from error


def checked_source(name: str) -> str:
    """Refuse, before asking the hub, what is no folder with weights and cannot be a hub name.

    Returns:
        The name, an existing folder with `~` written out.

    Raises:
        ModelError: It is refused; the message says why.
    """
    folder = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is
    if folder.is_dir():
        saved = sorted(folder.glob("checkpoints/step-*/policy/config.json"))
        if saved:
            raise ModelError(
                f"{name} is a run folder, not a model: give {saved[-1].parent}, its newest policy."
            )
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{name} has no config.json: give a folder saved with save_pretrained."
            )
        if not any(folder.glob("*.safetensors")):
            raise ModelError(
                f"{name} has no *.safetensors file, the only format of weights that is read: save "
                "the model there with save_pretrained."
            )
        return str(folder)
    nested = os.sep in name and folder.parent.is_dir()
    if folder.exists() or nested or not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"The model folder {name} does not exist: give a folder with config.json, tokenizer "
            "and *.safetensors, or the name of a model on the Hugging Face hub."
        )
    return name


def _check_layers(name: str, model: PreTrainedModel) -> None:
    """Refuse recurrent layers, which have no keys and values to share, and chunked attention."""
    other = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION
    if other:
        raise ModelError(
            f"The model {name} has layers of kind {min(other)}, but only full and sliding "
            "attention can be used: choose a plain transformer."
        )


def _set_attention(name: str, model: PreTrainedModel) -> None:
    """Have the model's attention done by `tba.policy.attention`."""
    model.set_attn_implementation(register_attention())
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        raise ModelError(
            f"The model {name} ({type(model).__name__}) computes its attention itself instead of "
            "through transformers' AttentionInterface: choose a model of another family."
        )


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero: log-probabilities are exact in training mode too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def known_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model knows; None: it has no such bound."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_positions(model: PreTrainedModel, queries: Sequence[Query], completion: int) -> None:
    """Refuse queries whose answers would run beyond the positions that the model knows.

    Raises:
        ConfigError: The longest prompt and completion together do not fit.
    """
    known = known_positions(model)
    longest = max(len(query.prompt_ids) for query in queries)
    if known is not None and longest + completion > known:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and search.max_completion_length is "
            f"{completion}, but the model knows {known} positions: shorten one of the two (longer "
            "prompts are skipped beyond task.max_prompt_length)"
        )


def recompute_activations(model: PreTrainedModel) -> None:
    """Switch on gradient checkpointing, by its newer name where transformers has it."""
    switch = "activation_checkpointing_enable"
    if not hasattr(model, switch):
        switch = "gradient_checkpointing_enable"
    getattr(model, switch)({"use_reentrant": False})
    model.train()


def _eos_ids(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the tokenizer's end-of-sequence id and, of the generation config's, those it knows."""
    own = tokenizer.eos_token_id
    if own is None:
        raise ModelError(
            f"The tokenizer of {name} has no end-of-sequence token, so no response could end: set "
            "eos_token in its tokenizer_config.json."
        )
    rows = model.get_output_embeddings().weight.shape[0]
    if own >= rows:
        raise ModelError(
            f"The end-of-sequence token of {name} has the id {own}, but its model knows {rows} "
            "tokens only: resize the model's embeddings to the tokenizer."
        )
    named = model.generation_config.eos_token_id
    also = named if isinstance(named, list) else [named]
    known = {token for token in also if isinstance(token, int) and 0 <= token < len(tokenizer)}
    return (own, *sorted(known - {own}))
