"""Search speed: tokens a second of this package's engine and of what people use today.

    python -m benchmarks.search [--model DIR] [--vllm-python PATH] [--threads 2] [--device cuda]

All contestants sample the same numbers of responses to the same prompts, of the same lengths: ends
of sequence are ignored, each row ends at a length drawn in advance.

    tba             the torch engine, with the linear layers that `search.precision` gives it
    tba-int8        the same with weights of eight bits
    generate        transformers' `generate`; rows end by a stopping criterion of their own
    continuous      transformers' continuous batching; one request a sample
    vllm-eager      vLLM; one request a sample, prompts shared through its prefix cache, which is
    vllm-compiled   emptied before each repetition

Only `tba` computes log-probabilities of what it samples. The contestants take turns, and speeds are
medians: by the clock and, on CPUs, by the processor time of all threads, which other work on the
machine hardly changes and which is what counts where all have one thread. DIR is a folder with
SmolLM2-135M (`scripts/smollm2.py`); without it only the tiny model is measured. PATH is the
interpreter of an environment with vLLM; without it vLLM is left out. What AMX makes of the
precisions shows by ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import ContinuousBatchingManager
from transformers.utils.logging import disable_progress_bar

from benchmarks.arguments import count, names, shapes
from tba.config.model import BuildConfig, ModelConfig
from tba.config.search import Precision
from tba.engines.base import Sampling
from tba.engines.linears import quicken
from tba.engines.torch_engine import TorchEngine
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.records import Int32, Int64, Query

_PAGE = 32
"""Tokens of a page of continuous batching's cache; whole pages of prompts are shared."""

TINY = BuildConfig(
    characters="".join(map(chr, range(33, 95))), num_hidden_layers=4, max_position_embeddings=64
)
"""A million parameters, a vocabulary of 64."""


@dataclass(frozen=True)
class Shape:
    """What is asked for: numbers of queries and samples, ranges of lengths in tokens."""

    queries: int
    samples: int
    prompt: tuple[int, int]
    response: tuple[int, int]
    precisions: tuple[Precision, ...] = ("bfloat16",)
    tiny: bool = False
    """Whether the model is the tiny one."""


SHAPES = {
    "8x16": Shape(8, 16, (56, 72), (48, 128)),
    "1x8": Shape(1, 8, (56, 72), (48, 128)),
    "tiny": Shape(16, 16, (16, 16), (48, 48), ("float32", "bfloat16"), tiny=True),
}
CONTESTANTS = ("tba", "generate", "tba-int8", "continuous", "vllm-eager", "vllm-compiled")
"""The first two alone have the tiny model, the last two need vLLM."""


@dataclass(frozen=True)
class Work:
    """A shape with a model and what was drawn."""

    folder: Path
    precision: Precision
    prompts: list[Int32]
    lengths: Int64
    """Tokens of each response, shape [query, sample]."""
    threads: int
    device: torch.device

    @property
    def samples(self) -> int:
        """Responses to each prompt."""
        return self.lengths.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """What a plain model computes in."""
        return getattr(torch, self.precision)


def make_work(shape: Shape, folder: Path, precision: Precision, threads: int, device: str) -> Work:
    """Draw prompts and lengths."""
    rng = np.random.default_rng(0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = rng.integers(shape.prompt[0], shape.prompt[1] + 1, shape.queries)
    prompts = [rng.integers(3, vocabulary, size).astype(np.int32) for size in sizes]
    low, high = shape.response
    lengths = rng.integers(low, high + 1, (shape.queries, shape.samples))
    return Work(folder, precision, prompts, lengths, threads, torch.device(device))


@dataclass(frozen=True, slots=True)
class Spent:
    """What one repetition took."""

    wall_s: float
    cpu_s: float


Turn = Callable[[], Spent]
"""Samples all responses once."""


class EndsAtLengths(TorchEngine):
    """The engine, with rows that end at given lengths and at no token."""

    def __init__(self, model: PreTrainedModel, lengths: Int64) -> None:
        super().__init__(model, eos_ids=())
        self._last = torch.from_numpy(lengths.reshape(-1) - 1).to(model.device)  # [row]

    def _stops(self, row: Tensor, at: Tensor, token: Tensor) -> Tensor:
        return self._last[row] == at


class RowsEnd(StoppingCriteria):
    """The same for `generate`."""

    def __init__(self, prompt: int, lengths: Int64, device: torch.device) -> None:
        self._until = torch.from_numpy(prompt + lengths.reshape(-1)).to(device)  # [row]

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Return which rows are at their ends."""
        return self._until <= input_ids.shape[1]


def _timed(work: Work, sample: Callable[[], Sequence[int]]) -> Spent:
    """Time one repetition, which returns the lengths of the responses it has sampled."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = sample()
    spent = Spent(time.perf_counter() - wall, time.process_time() - cpu)
    assert sorted(found) == sorted(work.lengths.flat), "the lengths are not those asked for"
    return spent


@contextmanager
def tba(work: Work, precision: Precision | None = None) -> Iterator[Turn]:
    """This package's engine."""
    model = load_policy(work.folder, ModelConfig(), device=work.device, dtype=work.dtype).model
    engine = EndsAtLengths(quicken(model, precision or work.precision), work.lengths)
    queries = [Query(at, "", ids, {}) for at, ids in enumerate(work.prompts)]
    sampling = Sampling(work.samples, 1.0, int(work.lengths.max()))
    generator = torch.Generator(work.device).manual_seed(0)

    def sample() -> list[int]:
        found = engine.generate(queries, sampling, generator)
        return [len(response.tokens) for group in found for response in group]

    yield lambda: _timed(work, sample)


def _plain(work: Work) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    # What `generate` is not told it looks up here.
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.to(work.device).eval()


@contextmanager
def generate(work: Work) -> Iterator[Turn]:
    """`generate` of transformers, prompts padded on the left."""
    model = _plain(work)
    longest = max(map(len, work.prompts))
    ids, mask = (torch.zeros(len(work.prompts), longest, dtype=torch.long) for _ in range(2))
    for at, prompt in enumerate(work.prompts):
        ids[at, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[at, longest - len(prompt) :] = 1
    ends = StoppingCriteriaList([RowsEnd(longest, work.lengths, work.device)])

    def sample() -> list[int]:
        full = model.generate(
            ids.to(work.device),
            attention_mask=mask.to(work.device),
            do_sample=True,
            top_k=0,
            num_return_sequences=work.samples,
            max_new_tokens=int(work.lengths.max()),
            stopping_criteria=ends,
        )
        assert full.cpu().shape == (work.lengths.size, longest + work.lengths.max())
        return work.lengths.flatten().tolist()

    yield lambda: _timed(work, sample)


@contextmanager
def continuous(work: Work) -> Iterator[Turn]:
    """Continuous batching of transformers."""
    model = _plain(work)
    options = GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
    )
    longest = max(map(len, work.prompts)) + int(work.lengths.max())
    blocks = work.lengths.size * -(-longest // _PAGE)
    # Left to itself, it takes nine tenths of the machine's memory.
    memory = ContinuousBatchingConfig(page_size=_PAGE, num_blocks=blocks, max_batch_tokens=1024)

    def turn() -> Spent:
        # Opened for its turn only: its thread would disturb the others.
        with model.continuous_batching_context_manager(
            options, continuous_batching_config=memory
        ) as manager:
            return _timed(work, lambda: _answers(work, manager))

    yield turn


def _answers(work: Work, manager: ContinuousBatchingManager) -> list[int]:
    """Return the lengths of what continuous batching answers, one request a sample."""
    for prompt, lengths in zip(work.prompts, work.lengths, strict=True):
        for length in lengths.tolist():
            manager.add_request(prompt.tolist(), max_new_tokens=length)
    found: list[int] = []
    while len(found) < work.lengths.size:
        result = manager.get_result(timeout=600)
        assert result is not None, "continuous batching has stopped"
        if result.is_finished():
            found.append(len(result.generated_tokens))
    return found


@contextmanager
def vllm(work: Work, python: Path, compiled: bool) -> Iterator[Turn]:
    """vLLM, in a process of its own that takes its turn when told to."""
    task = {
        "folder": str(work.folder),
        "precision": work.precision,
        "compiled": compiled,
        "prompts": [prompt.tolist() for prompt in work.prompts],
        "lengths": work.lengths.tolist(),
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(work.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)  # its packages are not ours
    child = subprocess.Popen(
        [python, Path(__file__).with_name("search_vllm.py"), json.dumps(task)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def turn() -> Spent:
            print("go", file=stdin, flush=True)
            for line in stdout:
                if line.startswith("spent "):
                    return Spent(*map(float, line.split()[1:]))
            raise SystemExit("vLLM has ended early: see its messages above")

        yield turn
        stdin.close()


def contestants(arguments: argparse.Namespace, shape: Shape) -> dict[str, Callable[[Work], object]]:
    """Return what is measured at a shape, by name, ours first."""
    found: dict[str, Callable[[Work], object]] = {"tba": tba, "generate": generate}
    if not shape.tiny:
        found["tba-int8"] = lambda work: tba(work, "int8")
        found["continuous"] = continuous
        if arguments.vllm_python is not None:
            for name in ("eager", "compiled"):
                found[f"vllm-{name}"] = lambda work, name=name: vllm(
                    work, arguments.vllm_python, name == "compiled"
                )
    return {name: maker for name, maker in found.items() if name in arguments.contestants}


def take_turns(
    work: Work, makers: dict[str, Callable[[Work], object]], repeats: int
) -> dict[str, Spent]:
    """Return the median times of each contestant; the first turn of each does not count."""
    spent: dict[str, list[Spent]] = {name: [] for name in makers}
    with ExitStack() as stack:
        turns = {name: stack.enter_context(maker(work)) for name, maker in makers.items()}
        for _ in range(1 + repeats):
            for name, turn in turns.items():
                spent[name].append(turn())
    return {
        name: Spent(median(s.wall_s for s in found[1:]), median(s.cpu_s for s in found[1:]))
        for name, found in spent.items()
    }


def lines(shape: str, work: Work, found: dict[str, Spent]) -> Iterator[str]:
    """Return the table's lines of a shape; the ratios are those of the first contestant."""
    first = next(iter(found.values()))
    tokens = work.lengths.sum()
    for name, spent in found.items():
        cells = [shape, work.precision, str(work.threads), name]
        for one, other in ((spent.wall_s, first.wall_s), (spent.cpu_s, first.cpu_s)):
            cells += [f"{tokens / one:.0f}", f"{one / other:.2f}"]
        yield "| " + " | ".join(cells) + " |"


HEAD = (
    "| shape | precision | threads | contestant | tokens/s | tba / it | tokens/CPU-s | tba / it |",
    "|---" * 8 + "|",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder with SmolLM2-135M")
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vLLM")
    parser.add_argument("--shapes", type=names(SHAPES, "shape"), help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--contestants", type=names(CONTESTANTS, "contestant"), default=CONTESTANTS)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    tiny = {name: shape.tiny for name, shape in SHAPES.items()}
    asked = shapes(parser, arguments.shapes, tiny, arguments.model)
    if arguments.vllm_python is not None and not arguments.vllm_python.is_file():
        parser.error(f"--vllm-python {arguments.vllm_python} is no file: name an interpreter")
    for name in asked:
        if not contestants(arguments, SHAPES[name]):
            parser.error(f"none of {','.join(arguments.contestants)} takes part at shape {name}")
    disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    if arguments.vllm_python is None:
        print("vLLM is left out: --vllm-python names no interpreter that has it.\n")
    print(*HEAD, sep="\n")
    with TemporaryDirectory() as scratch:
        build_policy(TINY, Path(scratch), seed=0)
        for name in asked:
            shape = SHAPES[name]
            folder = Path(scratch) if shape.tiny else arguments.model
            for precision in shape.precisions:
                work = make_work(shape, folder, precision, arguments.threads, arguments.device)
                found = take_turns(work, contestants(arguments, shape), arguments.repeats)
                print(*lines(name, work, found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
