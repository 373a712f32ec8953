"""What is to be measured on a GPU, in one run; `benchmarks/gpu.sh` calls it.

    search       tokens a second of the torch engine and of transformers' `generate`, same batch
    training     response tokens a second of this package's pass, of the naive padded pass (a) and
                 of the floor (c), as `benchmarks.training` defines them, and the share of the
                 card's bfloat16 peak that the pass's arithmetic makes up (model-FLOP utilisation)
    publishing   milliseconds that publishing weights takes the trainer, until they are current, and
                 that a searcher takes to pull and verify them
    arithmetic   the recipe, asynchronously, trainer and searcher on the same device

The large model has the shape of Qwen2.5-0.5B and random weights. Each part is run by itself, so
that one that fails leaves the others' figures; what failed is told, and the exit code is 1.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks import training
from tba.config.search import Precision
from tba.engines import Sampling
from tba.engines.linears import quicken
from tba.engines.torch_engine import TorchEngine
from tba.policy.attention import register_attention
from tba.policy.loading import Policy
from tba.records import Query
from tba.sync import WeightStore

Figures = dict[str, float]

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40": 181.0, "A10": 125.0}
"""Dense bfloat16 peak by the name of the card, in 10^12 operations a second."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    model: Mapping[str, int]
    """Settings of the large model."""
    searches: tuple[tuple[int, int], ...]
    """(queries, samples) of the search batches."""
    prompt: int
    """Tokens of a prompt in them."""
    response: int
    """Tokens of a response in them."""
    batches: Mapping[str, training.Shape]
    """Shapes of the training batches."""
    repeats: int
    """Timed repetitions of which the median is taken."""
    recipe: tuple[str, ...]
    """Settings of the recipe that differ."""


LARGE = Size(
    model={
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    searches=((1, 8), (8, 16), (32, 16)),
    prompt=128,
    response=256,
    batches={
        "gsm8k": training.Shape(4, 16, (95, 105), (50, 200)),
        "sums": training.Shape(32, 16, (28, 32), (9, 11)),
    },
    repeats=3,
    recipe=(),
)
SMALL = Size(
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    searches=((2, 4),),
    prompt=16,
    response=24,
    batches={"gsm8k": training.Shape(2, 4, (9, 11), (5, 20))},
    repeats=2,
    recipe=("--trainer.steps=20", "--warm_start.steps=50", "--evaluation.queries=64"),
)


def build(size: Size, device: torch.device) -> PreTrainedModel:
    """Return the large model with random weights, float32."""
    torch.manual_seed(0)
    config = Qwen2Config(**size.model, tie_word_embeddings=True, max_position_embeddings=2_048)
    with device:
        model = Qwen2ForCausalLM(config)
    model.set_attn_implementation(register_attention())
    return model.eval()


def timed(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median seconds of some repetitions, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def search(size: Size, device: torch.device) -> Figures:
    """Measure the engine in its precisions, and `generate` in bfloat16."""
    found: Figures = {}
    precisions: list[Precision] = ["bfloat16", "int8"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        precisions.append("float8")
    rng = np.random.default_rng(0)
    for queries, samples in size.searches:
        prompts = rng.integers(2, size.model["vocab_size"], (queries, size.prompt))
        tokens = queries * samples * size.response
        work = _generate(size, prompts, samples, device)
        found[f"{queries}x{samples} generate"] = tokens / timed(work, size.repeats, device)
        for precision in precisions:
            work = _decode(size, prompts, samples, precision, device)
            seconds = timed(work, size.repeats, device)
            found[f"{queries}x{samples} tba {precision}"] = tokens / seconds
    return found


def _generate(
    size: Size, prompts: np.ndarray, samples: int, device: torch.device
) -> Callable[[], object]:
    """Return a search batch by transformers."""
    model = build(size, device).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    rows = torch.from_numpy(prompts).repeat_interleave(samples, 0).to(device)
    return partial(
        torch.inference_mode()(model.generate),
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        top_k=0,
        min_new_tokens=size.response,
        max_new_tokens=size.response,
    )


def _decode(
    size: Size, prompts: np.ndarray, samples: int, precision: Precision, device: torch.device
) -> Callable[[], object]:
    """Return a search batch by the torch engine; nothing ends a response before its last token."""
    engine = TorchEngine(quicken(build(size, device).to(torch.bfloat16), precision), ())
    queries = [Query(at, "", ids.astype(np.int32)) for at, ids in enumerate(prompts)]
    sampling = Sampling(samples, 1.0, size.response)
    return lambda: engine.generate(queries, sampling, torch.Generator().manual_seed(0))


def train(size: Size, device: torch.device) -> Figures:
    """Measure training passes on the batches in bfloat16 autocast."""
    found: Figures = {}
    for name, shape in size.batches.items():
        model = build(size, device)
        policy = Policy(model=model, tokenizer=None, eos_ids=(0,))  # type: ignore[arg-type]
        work = training.draw_batch(policy, shape, "bfloat16")
        body = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
        head = size.model["vocab_size"] * size.model["hidden_size"]
        operations = 6.0 * (body * work.packed_tokens + head * work.response_tokens)
        for method in ("packed", "naive", "floor"):
            each = training.MAKERS[method](work)
            each.seconds()
            seconds = median(each.seconds() for _ in range(size.repeats))
            found[f"{name} {method}"] = work.response_tokens / seconds
            if method == "packed" and (peak := peak_tflops(device)):
                found[f"{name} utilisation"] = operations / seconds / (peak * 1e12)
    return found


def peak_tflops(device: torch.device) -> float:
    """Return the card's bfloat16 peak, 0 where it is not known."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), 0.0)


def publishing(size: Size, device: torch.device) -> Figures:
    """Measure the weights' wire from and to the device, in bfloat16."""
    weights = dict(build(size, device).named_parameters())
    searcher = dict(build(size, device).to(torch.bfloat16).named_parameters())
    store = WeightStore(weights, torch.bfloat16)
    times: dict[str, list[float]] = {"publish ms": [], "until current ms": [], "pull ms": []}
    for version in range(size.repeats + 1):
        start = time.perf_counter()
        store.publish(weights, version)
        times["publish ms"].append(time.perf_counter() - start)
        store.flush()
        times["until current ms"].append(time.perf_counter() - start)
        start = time.perf_counter()
        assert store.pull(searcher, newer_than=version - 1) == version
        times["pull ms"].append(time.perf_counter() - start)
    found = {name: 1e3 * median(seconds[1:]) for name, seconds in times.items()}
    found["megabytes"] = sum(weight.numel() for weight in weights.values()) * 2 / 1e6
    return found


def arithmetic(size: Size, out: Path) -> Figures:
    """Train the recipe in processes of its own and return its summary's figures."""
    run = out / "arithmetic"
    command = "import sys; from tba.cli import main; sys.exit(main())"
    arguments = ["train", "arithmetic", "--run-dir", str(run), "--clean", *size.recipe]
    subprocess.run([sys.executable, "-c", command, *arguments], check=True, timeout=420)
    summary = json.loads((run / "summary.json").read_text())
    figures: Figures = {
        f"{when} {kind}": summary[when][f"{kind}_pass_at_1"]
        for when in ("before", "after")
        for kind in ("sampled", "greedy")
    }
    figures["seconds"] = summary["seconds"]
    return figures


def main() -> None:
    """Measure every part, write results.json and report.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = LARGE if device.type == "cuda" else SMALL
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, small size"
    print(f"{name}; torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    parts: dict[str, Callable[[], Figures]] = {
        "search, tokens/s": lambda: search(size, device),
        "training, response tokens/s": lambda: train(size, device),
        "publishing": lambda: publishing(size, device),
        "recipe arithmetic": lambda: arithmetic(size, arguments.out),
    }
    results: dict[str, Figures | str] = {"device": name}
    lines = [f"# {name}", ""]
    failed = False
    for title, measure in parts.items():
        start = time.perf_counter()
        try:
            results[title] = figures = measure()
            rows = [f"| {what} | {figure:,.3g} |" for what, figure in figures.items()]
        except Exception as error:  # the other parts shall still be measured
            traceback.print_exc()
            failed = True
            results[title] = repr(error)
            rows = [f"| failed | {type(error).__name__} |"]
        seconds = time.perf_counter() - start
        part = [f"## {title} ({seconds:.0f} s)", "", "| what | figure |", "|---|---|", *rows, ""]
        print("\n".join(part), flush=True)
        lines += part
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
        (arguments.out / "report.md").write_text("\n".join(lines))
    sys.exit(failed)


if __name__ == "__main__":
    main()
