"""Small random sequence classifiers as folders, with a character tokenizer."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

PAD, EOS = 0, 1
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+=[] :"
CHAT = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}"


def character_tokenizer(pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    alphabet = ["<pad>", "<eos>", *CHARACTERS]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(alphabet)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token="<eos>", model_max_length=64
    )


def tiny_classifier(
    folder: Path, family: str = "llama", *, pad: int | None = PAD, chat: bool = False, **config
) -> str:
    """Write a random model, far from uniform, and return its folder."""
    shared = {
        "vocab_size": 2 + len(CHARACTERS),
        "pad_token_id": pad,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "num_labels": 1,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _FAMILIES[family](shared)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    tokenizer = character_tokenizer("<eos>" if pad == EOS else "<pad>")
    if chat:
        tokenizer.chat_template = CHAT
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


_FAMILIES = {
    "llama": lambda shared: LlamaForSequenceClassification(
        LlamaConfig(
            **shared,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=48,
        )
    ),
    "gpt2": lambda shared: GPT2ForSequenceClassification(
        GPT2Config(**shared, n_embd=16, n_layer=2, n_head=2, n_positions=48)
    ),
    "gpt_neox": lambda shared: GPTNeoXForSequenceClassification(
        GPTNeoXConfig(
            **shared,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=48,
        )
    ),
    "roberta": lambda shared: RobertaForSequenceClassification(
        RobertaConfig(
            **shared,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=66,
        )
    ),
}
