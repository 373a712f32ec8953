"""A small language model and pairs of completions that a small reward model can learn to order."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_classifiers import CHARACTERS, EOS, PAD, character_tokenizer


def language_model(folder: Path, pad: int = PAD) -> str:
    """Write a small language model with random weights, and return its folder."""
    config = LlamaConfig(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=pad,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer("<pad>" if pad == PAD else "<eos>").save_pretrained(folder)
    return str(folder)


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return pairs of which the completion with more vowels is the better one."""
    generator = random.Random(seed)

    def word(vowels: int) -> str:
        letters = generator.choices("aeiou", k=vowels) + generator.choices("bcdfgk", k=8 - vowels)
        generator.shuffle(letters)
        return "".join(letters)

    rows = []
    for _ in range(count):
        fewer = generator.randint(0, 4)
        more = generator.randint(fewer + 2, 8)
        prompt = "".join(generator.choices("xyz", k=generator.randint(1, 5))) + ":"
        rows.append({"prompt": prompt, "chosen": word(more), "rejected": word(fewer)})
    return rows


def write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    """Write rows as JSONL, and return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
