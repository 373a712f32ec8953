"""Whole runs of small random models of each family, in folders with a character tokenizer."""

from pathlib import Path

from transformers import AutoTokenizer

from tba.config import BuildConfig, Config
from tba.policy.build import build_policy
from tiny_models import FAMILIES as PLAIN
from tiny_models import random_model
from tiny_runs import CHARACTERS, tiny_config

FAMILIES = (*PLAIN, "smollm2")


def family_folder(family: str, folder: Path) -> Path:
    """Write a random model of a family and a tokenizer; SmolLM2's pads with its end token."""
    build_policy(BuildConfig(characters=CHARACTERS), folder, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if family == "smollm2":
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder)
    is_smollm2 = family == "smollm2"
    model = random_model(
        "llama" if is_smollm2 else family,
        **{"tie_word_embeddings": True} if is_smollm2 else {},
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
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
