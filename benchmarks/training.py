"""Training speed and memory: response tokens a second of one forward and backward pass.

    python -m benchmarks.training --model DIR [--device cuda] [--precisions bfloat16,float32]

`packed` is this package's pass; (a) `naive` is what most trainers do, full rows of prompt and
response padded on the right, logits of all positions, float32 log-softmax; (b) `trl` is the loss
step of TRL's GRPOTrainer on the same batch, without gradient checkpointing; (c) `floor` runs as
many tokens as `packed` in the rectangle that is fastest, with transformers' causal attention, and
the head at as many positions as there are response tokens. All compute in the same precision with
the same threads. Speeds are medians over repetitions in which the passes take turns; memory is the
growth of the peak over the state before, each measured in a process of its own. DIR is a folder
with SmolLM2-135M (`scripts/smollm2.py`); without it only the tiny model of recipe `arithmetic` is
measured.
"""

import argparse
import copy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.arguments import count, names, shapes
from tba.config import ModelConfig
from tba.config.load import load_config
from tba.policy.attention import ATTENTION
from tba.policy.build import build_policy
from tba.policy.loading import Policy, load_policy
from tba.policy.log_probs import response_log_probs
from tba.policy.log_softmax import choose, log_softmax_at
from tba.records import Int32, Int64

METHODS = ("packed", "naive", "trl", "floor")
PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True)
class Shape:
    """A batch: numbers of queries and samples, ranges of lengths in tokens."""

    queries: int
    samples: int
    prompt: tuple[int, int]
    response: tuple[int, int]
    tiny: bool = False
    """Whether the model is the tiny one of recipe `arithmetic`."""


SHAPES = {
    "gsm8k": Shape(1, 16, (95, 105), (50, 200)),
    "sums": Shape(8, 8, (28, 32), (9, 11)),
    "arithmetic": Shape(64, 8, (8, 8), (2, 5), tiny=True),
}


@dataclass(frozen=True)
class Work:
    """A model with a batch."""

    policy: Policy
    prompts: list[Int32]
    responses: list[Int32]
    query_of_row: Int64
    precision: str

    @property
    def model(self) -> PreTrainedModel:
        """The policy's model."""
        return self.policy.model

    @property
    def low(self) -> bool:
        """Whether the forward pass runs in bfloat16."""
        return self.precision == "bfloat16"

    @property
    def response_tokens(self) -> int:
        """Tokens in all responses."""
        return sum(map(len, self.responses))

    @property
    def packed_tokens(self) -> int:
        """Tokens that need computation: prompts once, responses less their last tokens."""
        return sum(map(len, self.prompts)) + self.response_tokens - len(self.responses)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.low)


def make_work(shape: Shape, folder: Path, precision: str, device: str) -> Work:
    """Load the model and draw a batch."""
    policy = load_policy(folder, ModelConfig(), device=torch.device(device), dtype=torch.float32)
    return draw_batch(policy, shape, precision)


def draw_batch(policy: Policy, shape: Shape, precision: str) -> Work:
    """Draw a batch of random tokens for a policy."""
    rng = np.random.default_rng(0)
    vocabulary = policy.model.config.vocab_size

    def ragged(count: int, lengths: tuple[int, int]) -> list[Int32]:
        sizes = rng.integers(lengths[0], lengths[1] + 1, count)
        return [rng.integers(0, vocabulary, size).astype(np.int32) for size in sizes]

    rows = shape.queries * shape.samples
    return Work(
        policy,
        ragged(shape.queries, shape.prompt),
        ragged(rows, shape.response),
        np.repeat(np.arange(shape.queries), shape.samples),
        precision,
    )


@dataclass(frozen=True)
class Pass:
    """One way to compute a loss of the batch."""

    model: PreTrainedModel
    attention: str
    loss: Callable[[], Tensor]

    def seconds(self) -> float:
        """Time one forward and backward pass."""
        self.model.set_attn_implementation(self.attention)
        self.model.zero_grad(set_to_none=True)
        self._wait()
        start = time.perf_counter()
        self.loss().backward()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def packed(work: Work) -> Pass:
    """Return this package's pass."""

    def loss() -> Tensor:
        log_pi, mask = response_log_probs(
            work.model,
            work.prompts,
            work.responses,
            work.query_of_row,
            temperature=1.0,
            autocast=torch.bfloat16 if work.low else None,
        )
        return -log_pi[mask].mean()

    return Pass(work.model, ATTENTION, loss)


def naive(work: Work) -> Pass:
    """Return the pass over full rows, padded on the right."""
    rows = [
        np.concatenate([work.prompts[query], response])
        for query, response in zip(work.query_of_row, work.responses, strict=True)
    ]
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    real, counted = np.zeros_like(ids), np.zeros(ids.shape, dtype=np.float32)
    for at, (row, response) in enumerate(zip(rows, work.responses, strict=True)):
        ids[at, : len(row)], real[at, : len(row)] = row, 1
        counted[at, len(row) - len(response) : len(row)] = 1.0
    device = work.model.device
    tokens, mask, weight = (torch.from_numpy(part).to(device) for part in (ids, real, counted))

    def loss() -> Tensor:
        with work.autocast():
            logits = work.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        log_probs = logits[:, :-1].float().log_softmax(-1)
        log_pi = log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)
        return -(log_pi * weight[:, 1:]).sum() / weight.sum()

    return Pass(work.model, "sdpa", loss)


def trl(work: Work) -> Pass:
    """Return the loss step of TRL's GRPOTrainer, given samples and advantages."""
    from datasets import Dataset  # this method alone needs it
    from trl import GRPOConfig, GRPOTrainer

    model = copy.deepcopy(work.model)  # the trainer replaces methods of its model
    rows = len(work.responses)
    options = GRPOConfig(
        output_dir=str(Path(TemporaryDirectory().name)),
        use_cpu=work.model.device.type == "cpu",
        bf16=work.low,
        per_device_train_batch_size=rows,
        num_generations=rows // len(work.prompts),
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * rows}),
        processing_class=work.policy.tokenizer,
    )
    prompts = [work.prompts[query] for query in work.query_of_row]
    prompt_ids, prompt_mask = _padded(prompts, work.model.device, left=True)
    completion_ids, completion_mask = _padded(work.responses, work.model.device, left=False)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.ones(rows, device=work.model.device),
        "num_items_in_batch": completion_mask.sum(),
    }
    trainer.current_gradient_accumulation_steps = 1
    return Pass(model, "sdpa", lambda: trainer._compute_loss(model, inputs))


def _padded(rows: Sequence[Int32], device: torch.device, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return tokens and where they are real, [row, token]."""
    longest = max(map(len, rows))
    ids, real = (np.zeros((len(rows), longest), dtype=np.int64) for _ in range(2))
    for at, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[at, place], real[at, place] = row, 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)


def floor(work: Work) -> Pass:
    """Return the fastest bare pass over as many tokens, of several rectangles and two heads."""
    rectangles = []
    for length in (8, 16, 32, 64, 128, 256):
        rows = max(1, round(work.packed_tokens / length))
        shape = (rows, round(work.packed_tokens / rows))
        if shape[1] <= work.model.config.max_position_embeddings:
            rectangles.append(
                torch.randint(0, work.model.config.vocab_size, shape, device=work.model.device)
            )
    _floor(work, rectangles[0], in_strips=False).seconds()
    tokens = min(rectangles, key=lambda each: _floor(work, each, in_strips=False).seconds())
    return min((_floor(work, tokens, strips) for strips in (False, True)), key=Pass.seconds)


def _floor(work: Work, tokens: Tensor, in_strips: bool) -> Pass:
    """Return one bare pass, with torch's cross-entropy or with this package's softmax."""
    targets = torch.zeros(work.response_tokens, dtype=torch.long, device=tokens.device)
    count = np.minimum(np.arange(len(targets)), tokens.numel() - 1)  # one prompt, many first tokens
    at = torch.from_numpy(count).to(tokens.device)
    none = torch.empty(0, dtype=torch.long, device=tokens.device)
    strip = max(1, 2**18 // work.model.config.vocab_size) if tokens.device.type == "cpu" else 2**30
    chosen = choose(np.arange(len(targets)), np.zeros(len(targets), dtype=np.int64), none, strip)

    def loss() -> Tensor:
        with work.autocast():
            body = work.model.base_model(input_ids=tokens, use_cache=False)
            states = body.last_hidden_state.flatten(0, 1).index_select(0, at)
            logits = work.model.lm_head(states)
        if in_strips:
            return -log_softmax_at(logits, chosen, 1.0)[0].mean()
        return functional.cross_entropy(logits.float(), targets)

    return Pass(work.model, "sdpa", loss)


MAKERS: dict[str, Callable[[Work], Pass]] = {
    "packed": packed,
    "naive": naive,
    "trl": trl,
    "floor": floor,
}


def speeds(work: Work, repeats: int) -> dict[str, float]:
    """Return the median response tokens a second of each pass."""
    passes = {name: maker(work) for name, maker in MAKERS.items()}
    for each in passes.values():
        each.seconds()
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, each in passes.items():
            times[name].append(each.seconds())
    return {name: work.response_tokens / median(found) for name, found in times.items()}


def peak_bytes(work: Work, name: str) -> int:
    """Return by how much a pass makes the peak of memory grow, gradients included."""
    each = MAKERS[name](work)
    if work.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        each.seconds()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present state
    before = _status("VmRSS")
    each.seconds()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return a size in bytes from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_in_a_process(arguments: argparse.Namespace, shape: str, precision: str, name: str) -> int:
    """Measure the memory of one pass in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", "--peak-of", name]
    command += ["--shapes", shape, "--precisions", precision, "--device", arguments.device]
    command += ["--threads", str(arguments.threads)]
    if arguments.model is not None:
        command += ["--model", str(arguments.model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def line(arguments: argparse.Namespace, shape: str, precision: str, folder: Path) -> str:
    """Measure one shape in one precision and return a line of the table."""
    work = make_work(SHAPES[shape], folder, precision, arguments.device)
    found = speeds(work, arguments.repeats)
    del work
    cells = [shape, precision, *(f"{found[name]:.0f}" for name in METHODS)]
    cells += [f"{found['packed'] / found[name]:.2f}" for name in METHODS[1:]]
    if arguments.memory:
        peaks = {name: peak_in_a_process(arguments, shape, precision, name) for name in METHODS[:3]}
        cells += [f"{peak / 2**20:.0f}" for peak in peaks.values()]
    return "| " + " | ".join(cells) + " |"


def titles(memory: bool) -> list[str]:
    """Return the heads of the table's columns."""
    found = ["shape", "precision", *(f"{name} tokens/s" for name in METHODS)]
    found += [f"packed / {name}" for name in METHODS[1:]]
    return found + [f"{name} MiB" for name in METHODS[:3]] if memory else found


def main() -> None:
    """Print the table, or the memory of one pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder with SmolLM2-135M")
    parser.add_argument("--shapes", type=names(SHAPES, "shape"), help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--precisions", type=names(PRECISIONS, "precision"), default=PRECISIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peak-of", choices=METHODS[:3], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    tiny = {name: shape.tiny for name, shape in SHAPES.items()}
    asked = shapes(parser, arguments.shapes, tiny, arguments.model)
    with TemporaryDirectory() as scratch:
        build = load_config(["arithmetic"]).model.build
        assert build is not None
        build_policy(build, Path(scratch), seed=0)

        def folder(shape: str) -> Path:
            return Path(scratch) if SHAPES[shape].tiny else arguments.model

        if arguments.peak_of is not None:
            (shape,), (precision,) = asked, arguments.precisions
            work = make_work(SHAPES[shape], folder(shape), precision, arguments.device)
            print(peak_bytes(work, arguments.peak_of))
            return
        print("| " + " | ".join(titles(arguments.memory)) + " |")
        print("|---" * len(titles(arguments.memory)) + "|")
        for shape in asked:
            for precision in arguments.precisions:
                print(line(arguments, shape, precision, folder(shape)), flush=True)


if __name__ == "__main__":
    main()
