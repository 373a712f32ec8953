"""Whole runs of small random models of each family, in folders with a character tokenizer."""

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tba.config import BuildConfig, Config
from tba.policy.build import build_policy
from tiny_runs import CHARACTERS, tiny_config

_WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NEOX = {"num_attention_heads": 4, "max_position_embeddings": 64, "rotary_pct": 0.25}
_KINDS = ["sliding_attention", "full_attention"]
_GEMMA = {"head_dim": 4, "sliding_window": 4, "layer_types": _KINDS}

_CLASSES = {
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {**_WIDTHS, **_NEOX, "hidden_size": 32}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, {**_WIDTHS, **_HEADS}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**_WIDTHS, **_HEADS}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_WIDTHS, **_HEADS, "head_dim": 4}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_WIDTHS, **_HEADS, **_GEMMA}),
    "smollm2": (LlamaForCausalLM, LlamaConfig, {**_WIDTHS, **_HEADS, "tie_word_embeddings": True}),
}
FAMILIES = tuple(_CLASSES)


def family_folder(family: str, folder: Path) -> Path:
    """Write a random model of a family and a tokenizer; SmolLM2's pads with its end token."""
    model_class, config_class, settings = _CLASSES[family]
    build_policy(BuildConfig(characters=CHARACTERS), folder, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if family == "smollm2":
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder)
    config = config_class(
        **settings,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = model_class(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn(weight.shape))  # nothing is exactly symmetric
    model.save_pretrained(folder)
    return folder


def family_config(family: str, folder: Path, **sections: dict[str, object]) -> Config:
    """Return the settings of ten asynchronous steps with a model of a family."""
    model = {"build": None, "model_name_or_path": str(family_folder(family, folder / "initial"))}
    given = {
        "trainer": {"steps": 10},
        "sync": {"mode": "free", "sync_every": 2},
        "runtime": {"kind": "local", "trainer_threads": 1, "searcher_threads": 1},
        **sections,
    }
    return tiny_config(folder, **{**given, "model": {**model, **given.get("model", {})}})
