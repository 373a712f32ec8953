"""What the preference twin trains with: prompts, pairs that the gold judge has ordered, a proxy.

    train.jsonl, test.jsonl   short instructions; the held-out ones never meet a reward
    pairs.jsonl               completions of the initial policy, ordered by the gold judge
    pairs_test.jsonl          the same of training prompts that pairs.jsonl has not
    proxy/                    the reward model that every method is trained with; proxy.json tells
                              its accuracy on pairs_test.jsonl

Each is made once and found again by the next call; a call beside another one waits for it.
"""

import dataclasses
import fcntl
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gold_judge import judge
from tba.config import Config
from tba.config.reward_model import RewardModelConfig
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import DataError, StorageError
from tba.evaluation import sampled_texts
from tba.policy.loading import load_policy
from tba.reward_model_training import train_reward_model
from tba.tasks import load_task

LONGEST_PROMPT = 300
"""Characters; of a longer instruction a short answer is no answer."""
HELD_OUT = 64
"""Prompts that evaluations ask."""
PAIRS_HELD_OUT = 0.1
"""Share of the training prompts whose pairs measure the proxy."""
COMPLETIONS = 16
"""Completions of each training prompt, which make half as many pairs."""
QUERIES_A_BATCH = 16
SEED = 0
PREPARED_WITHIN_S = 3600.0
"""Longest time that a call waits for another one that prepares."""
PROXY = RewardModelConfig(model="", epochs=3, batch_size=16, learning_rate=1e-4)
"""How the proxy is trained; its seed and model apart."""


@dataclass(frozen=True, slots=True)
class Files:
    """Where everything is."""

    out: Path
    """Their folder."""

    @property
    def train(self) -> Path:
        """Prompts to train on."""
        return self.out / "train.jsonl"

    @property
    def test(self) -> Path:
        """Held-out prompts."""
        return self.out / "test.jsonl"

    @property
    def pairs(self) -> Path:
        """Pairs to train the proxy on."""
        return self.out / "pairs.jsonl"

    @property
    def pairs_test(self) -> Path:
        """Pairs to measure it on."""
        return self.out / "pairs_test.jsonl"

    @property
    def proxy(self) -> Path:
        """The reward model."""
        return self.out / "proxy"

    @property
    def proxy_report(self) -> Path:
        """What its training came to."""
        return self.out / "proxy.json"


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder, so that a call beside this one waits until it is given back.

    Raises:
        StorageError: It was not given back within `PREPARED_WITHIN_S`.
    """
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + PREPARED_WITHIN_S
    with (out / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StorageError(
                        f"another call has prepared {out} for more than {PREPARED_WITHIN_S:.0f} s: "
                        "end it, or choose another --out"
                    ) from None
                time.sleep(1)
        yield


def write_prompts(data: Path, files: Files) -> None:
    """Write the short instructions of a folder's JSON lines, some of them held out."""
    if files.test.is_file():
        return
    found = [row for file in sorted(data.glob("*.jsonl")) for row in prompts_of(file)]
    if len(found) <= 2 * HELD_OUT:
        raise DataError(
            f"--data {data} has {len(found)} instructions of at most {LONGEST_PROMPT} characters, "
            f"expected more than {2 * HELD_OUT}: name the folder of self-instruct's JSON lines"
        )
    random.Random(SEED).shuffle(found)
    _write(files.train, found[HELD_OUT:])
    _write(files.test, found[:HELD_OUT])


def prompts_of(file: Path) -> list[dict[str, str]]:
    """Return a row with a prompt for each instruction that asks for a short text."""
    tasks = [json.loads(line) for line in file.read_text().splitlines()]
    open_ended = [task for task in tasks if not task.get("is_classification", False)]
    asked = ((task["instruction"], task["instances"][0]["input"]) for task in open_ended)
    texts = ("\n".join(part.strip() for part in parts if part.strip()) for parts in asked)
    return [{"prompt": text} for text in texts if len(text) <= LONGEST_PROMPT]


def write_pairs(config: Config, files: Files) -> None:
    """Sample completions of the initial policy and write the pairs that the gold judge orders."""
    if files.pairs_test.is_file():
        return
    policy = load_policy(
        str(config.model.model_name_or_path),
        config.model,
        device=torch.device("cpu"),
        dtype=getattr(torch, config.search.dtype),
    )
    queries = load_task(config.task, policy.tokenizer, eos_ids=policy.eos_ids).train
    search = config.search
    texts = sampled_texts(
        TorchEngine(policy.model, policy.eos_ids),
        queries=queries,
        tokenizer=policy.tokenizer,
        sampling=Sampling(COMPLETIONS, search.temperature, search.max_completion_length),
        queries_per_batch=QUERIES_A_BATCH,
        seed=SEED,
    )
    pairs = [
        ordered(texts[first : first + COMPLETIONS]) for first in range(0, len(texts), COMPLETIONS)
    ]
    held_out = round(PAIRS_HELD_OUT * len(pairs))
    _write(files.pairs, [pair for own in pairs[held_out:] for pair in own])
    _write(files.pairs_test, [pair for own in pairs[:held_out] for pair in own])


def ordered(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return pairs of completions of one prompt, each used once, in the gold judge's order.

    The best meets the one in the middle, the middle one's successor the next: all pairs are about
    equally hard. The proxy reads completions alone, so the prompt is a space, which its tokenizer
    drops.
    """
    best_first = [text for _, text in sorted(zip(judge(texts), texts, strict=True), reverse=True)]
    half = len(best_first) // 2
    scores = judge(best_first)
    return [
        {"prompt": " ", "chosen": best_first[i], "rejected": best_first[i + half]}
        for i in range(half)
        if scores[i] > scores[i + half]
    ]


def train_proxy(embedder: Path, files: Files) -> dict[str, Any]:
    """Train the reward model from a small encoder, and return what its training came to."""
    if not files.proxy_report.is_file():
        shutil.rmtree(files.proxy, ignore_errors=True)
        config = PROXY.model_copy(update={"model": str(embedder), "test_file": files.pairs_test})
        trained = train_reward_model([files.pairs], config, out=files.proxy, tell=print)
        files.proxy_report.write_text(json.dumps(dataclasses.asdict(trained), indent=1))
    found: dict[str, Any] = json.loads(files.proxy_report.read_text())
    return found


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write rows whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    beside.replace(path)
