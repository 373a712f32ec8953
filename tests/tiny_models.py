"""Small random models of several families, float32, in which nothing is exactly symmetric."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tba.policy.attention import register_attention
from tba.policy.loading import switch_off_dropout

VOCABULARY = 23
EOS = 1

_SHARED = {"vocab_size": VOCABULARY, "pad_token_id": EOS, "eos_token_id": EOS, "bos_token_id": None}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_NEOX = {**_WIDTHS, "num_attention_heads": 4, "max_position_embeddings": 64}
_LLAMA = {**_WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
_HEAD = {"head_dim": 8}
# A window shorter than the prompts, and the soft cap that Gemma puts on its logits.
_GEMMA = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 2.0,
}

FAMILIES = {
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, _NEOX),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, _LLAMA),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _LLAMA),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_LLAMA, **_HEAD}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_LLAMA, **_HEAD, **_GEMMA}),
}


def random_model(family: str, seed: int = 0, **settings: object) -> PreTrainedModel:
    """Return a random model whose distributions are far from uniform, by settings of its own."""
    model_class, config_class, usual = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**_SHARED, **usual, **settings}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn(parameter.shape))
    return model


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model without dropout, with the package's attention."""
    model = random_model(family, seed)
    switch_off_dropout(model)
    model.set_attn_implementation(register_attention())
    return model.eval()
