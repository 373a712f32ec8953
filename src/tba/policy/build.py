"""Building a small policy from random weights, as an ordinary Hugging Face folder."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba.config.model import BuildConfig

_PAD, _EOS = "<pad>", "<eos>"


def build_policy(config: BuildConfig, folder: Path, seed: int) -> None:
    """Write a randomly initialised Llama and its character tokenizer to the folder."""
    tokenizer = _character_tokenizer(config)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        initializer_range=config.initializer_range,
        max_position_embeddings=config.max_position_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # transformers initialises from torch's global generator: borrow it, and put it back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _character_tokenizer(config: BuildConfig) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character, besides padding and end-of-sequence."""
    alphabet = dict.fromkeys([_PAD, _EOS, *config.characters])
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(alphabet)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # joins characters without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_PAD,
        eos_token=_EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=config.max_position_embeddings,
    )
