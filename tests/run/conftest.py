import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture
def make_model():
    """Build a small Llama with the given seed."""

    def make(seed: int = 0, **settings) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            eos_token_id=1,
            pad_token_id=0,
            **settings,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LlamaForCausalLM(config)

    return make


@pytest.fixture
def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1} | {str(i): i + 2 for i in range(10)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
