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
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

FAMILIES = {
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**_SHARED, **_WIDTHS, num_attention_heads=4, max_position_embeddings=64)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**_SHARED, n_embd=32, n_layer=2, n_head=4, n_positions=24)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHARED, **_WIDTHS, **_HEADS)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHARED, **_WIDTHS, **_HEADS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHARED, **_WIDTHS, **_HEADS, head_dim=8)),
    # A window shorter than the prompts, and the soft cap that Gemma puts on its logits.
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_SHARED,
            **_WIDTHS,
            **_HEADS,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            final_logit_softcapping=2.0,
        )
    ),
}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model without dropout whose distributions are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn(parameter.shape))
    switch_off_dropout(model)
    model.set_attn_implementation(register_attention())
    return model.eval()
