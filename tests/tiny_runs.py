"""Whole runs small enough for a test: a tiny model, a reward that any policy can raise."""

import json
from pathlib import Path

import safetensors.torch
from torch import Tensor

import tba
from tba.config import Config
from tba.run.rollouts import RolloutLog
from tba.run.summary import Summary

TASK = """
def train_rows():
    return [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(8)]

def test_rows():
    return [{"prompt": f"{a}+9="} for a in range(4)]

def reward(completions, **columns):
    return [sum(c.isdigit() for c in text) - 0.25 * len(text) for text in completions]
"""
CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def tiny_config(folder: Path, task: str = TASK, **sections: dict[str, object]) -> Config:
    """Return the settings of a tiny run; `sections` change or add single ones."""
    file = folder / "task.py"
    file.write_text(task)
    build = {
        "characters": CHARACTERS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "initializer_range": 0.25,
    }
    settings: dict[str, dict[str, object]] = {
        "model": {"build": build},
        "task": {"kind": "custom", "file": file, "max_prompt_length": 8, "pass_threshold": 1.0},
        "search": {"queries_per_batch": 4, "samples_per_query": 4, "max_completion_length": 4},
        "buffer": {"initial_samples": 16},
        "trainer": {
            "steps": 6,
            "queries_per_batch": 4,
            "samples_per_query": 4,
            "learning_rate": 3e-3,
            "micro_batch_tokens": 128,
        },
        "runtime": {"kind": "inline"},
        "evaluation": {"queries": 4},
        "checkpoint": {"every": 0},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return Config.model_validate(settings)


def train(folder: Path, config: Config) -> Summary:
    """Train in the folder `run` below."""
    return tba.train(config, run_dir=folder / "run", progress=False)


def final_tensors(run: Path) -> dict[str, Tensor]:
    """Return policy and optimiser of the newest checkpoint, by name."""
    newest = max((run / "checkpoints").glob("step-????????"))
    files = (newest / "policy" / "model.safetensors", newest / "optimizer.safetensors")
    return {
        f"{file.name}/{name}": tensor
        for file in files
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def rollouts(run: Path) -> list[dict[str, object]]:
    """Return every trajectory of a run's log as a plain row."""
    with RolloutLog(run / "rollouts.arrows") as log:
        return [row for batch in log.read() for row in batch.to_pylist()]


def metrics(run: Path) -> list[dict[str, object]]:
    """Return the lines of trainer steps."""
    whole = (run / "metrics.jsonl").read_text().split("\n")[:-1]  # the run may be writing one
    lines = [json.loads(line) for line in whole]
    return [line for line in lines if "loss" in line]
