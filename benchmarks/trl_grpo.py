"""TRL's GRPOTrainer on a recipe: same model, prompts, reward, K, batch and lengths.

What is set, and why (everything else is TRL's default, loss type and `num_iterations` included):

* `beta` 0, which is TRL's default too: no reference model, no time for it.
* The whole batch is generated at once; it is learnt from in one or in four micro-batches, whichever
  is quicker (`Layout`).
* `gradient_checkpointing` off: it would only cost time here. `bf16` as the layout says.
* No evaluation, no saving, no reports, no progress bar, no workers of the data loader; a log line
  every 10^6 steps. The reward function is called in the process.
* The rate warms up over the first 3 % of the time and falls linearly to zero at its end (TRL's
  default schedule, over time instead of steps, since the number of steps is not known before).
* Weights are kept with the clock paused, so that they cost TRL nothing.
"""

import json
import os
import socket
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from benchmarks.snapshots import Clock, Snapshots
from tba.config import Config
from tba.records import Query
from tba.tasks import load_task
from tba.tasks.rewards import BUILT_IN

WARMUP_SHARE = 0.03


@dataclass(frozen=True)
class Layout:
    """How TRL uses the cores."""

    processes: int
    """Processes that share each batch evenly (data parallel, gloo)."""
    threads: int
    """Threads of each."""
    micro_batches: int
    """Forward and backward passes of each process a step."""
    bf16: bool
    """Whether autocast is on."""

    def __str__(self) -> str:
        precision = "bf16" if self.bf16 else "float32"
        return f"{self.processes}x{self.threads} threads, {self.micro_batches} passes, {precision}"


@dataclass(frozen=True)
class TrlJob:
    """One run of TRL."""

    config: Config
    """The recipe; its objective, learning rate and sync section are of no account here."""
    model: str
    """Folder of the initial policy."""
    folder: Path
    """Where snapshots and `run.json` go."""
    learning_rate: float
    """Peak rate of AdamW."""
    layout: Layout
    """How the cores are used."""
    seconds: float
    """Training time."""
    every_s: float
    """Training time between two snapshots."""


def train_trl(job: TrlJob) -> dict[str, Any]:
    """Train in processes of their own; return what `run.json` holds.

    Keys: seconds, steps, learned (completions through the loss), found (the same), start_s (from
    the start of the process to the first step).
    """
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):  # as TRL's user has it: neither is set
        os.environ.pop(name, None)
    port, context = _free_port(), get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(job, rank, port, time.time()))
        for rank in range(job.layout.processes)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"TRL ended with exit codes {[p.exitcode for p in ranks]}")
    return json.loads((job.folder / "run.json").read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(job: TrlJob, rank: int, port: int, started: float) -> None:
    """Train as one of the processes."""
    if job.layout.processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.layout.processes),
            "LOCAL_WORLD_SIZE": str(job.layout.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    torch.set_num_threads(job.layout.threads)
    warnings.simplefilter("ignore")  # TRL calls deprecated names of transformers
    disable_progress_bar()
    trl, datasets = import_module("trl"), import_module("datasets")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    task = load_task(job.config.task, tokenizer)
    rows = [{**query.columns, "prompt": query.prompt} for query in task.train]
    _check_prompts(task.train[0], tokenizer)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=_reward_function(task.reward.functions),
        args=trl.GRPOConfig(**_arguments(job)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[_Keeper(job, rank, started)],
    )
    trainer.remove_callback(PrinterCallback)
    torch.set_num_threads(job.layout.threads)  # whatever accelerate has made of it
    trainer.train()


def _arguments(job: TrlJob) -> dict[str, Any]:
    config, layout = job.config, job.layout
    completions = config.trainer.queries_per_batch * config.trainer.samples_per_query
    return {
        "output_dir": str(job.folder / "trl"),
        "use_cpu": True,
        "bf16": layout.bf16,
        "num_generations": config.trainer.samples_per_query,
        "per_device_train_batch_size": completions // (layout.processes * layout.micro_batches),
        "gradient_accumulation_steps": layout.micro_batches,
        "max_completion_length": config.search.max_completion_length,
        "temperature": config.search.temperature,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",  # the callback sets the rate by time
        "beta": 0.0,
        "gradient_checkpointing": False,
        "max_steps": 10**6,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "ddp_find_unused_parameters": False,
        "seed": config.seed,
    }


def _reward_function(names: tuple[str, ...]) -> Any:
    """Return the recipe's own reward function; built-in ones only."""
    (name,) = names
    assert name in BUILT_IN.values(), "the benchmark knows recipes with one built-in reward"
    module, function = name.split(":")
    reward = getattr(import_module(module), function)

    def called(completions: list[str], **columns: Any) -> list[float]:
        wanted = reward.__code__.co_varnames[: reward.__code__.co_argcount]
        return reward(completions, **{k: v for k, v in columns.items() if k in wanted})

    return called


def _check_prompts(query: Query, tokenizer: Any) -> None:
    """Refuse a tokenizer that reads the finished prompt otherwise than the package does."""
    assert tokenizer(query.prompt)["input_ids"] == query.prompt_ids.tolist()


def learning_rate_share(share_of_time: float) -> float:
    """Return the rate relative to its peak: linear warm-up, then linear to zero."""
    if share_of_time < WARMUP_SHARE:
        return share_of_time / WARMUP_SHARE
    return max(0.0, (1 - share_of_time) / (1 - WARMUP_SHARE))


class _Keeper(TrainerCallback):  # type: ignore[misc]
    """Sets the rate, keeps weights and ends the run, by the clock of the first process."""

    def __init__(self, job: TrlJob, rank: int, started: float) -> None:
        self._job = job
        self._started = started
        self._clock = Clock()
        self._seconds = self._start_s = 0.0
        self._snapshots = None
        if rank == 0:
            dtype = getattr(torch, job.config.search.dtype)
            folder = job.folder / "snapshots"
            self._snapshots = Snapshots(folder, every_s=job.every_s, dtype=dtype)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._start_s = time.time() - self._started
        self._clock.start()
        self._keep(state, parts["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        share = learning_rate_share(self._seconds / self._job.seconds)
        for group in parts["optimizer"].param_groups:
            group["lr"] = self._job.learning_rate * share

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._seconds = self._agreed_seconds()
        self._keep(state, parts["model"])
        control.should_training_stop = self._over

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._snapshots is None:
            return
        trainer = self._job.config.trainer
        learned = state.global_step * trainer.queries_per_batch * trainer.samples_per_query
        facts = {"seconds": self._seconds, "steps": state.global_step, "learned": learned}
        facts |= {"found": learned, "start_s": self._start_s}
        (self._job.folder / "run.json").write_text(json.dumps(facts))

    @property
    def _over(self) -> bool:
        return self._seconds >= self._job.seconds

    def _keep(self, state: Any, model: Any) -> None:
        if self._snapshots is not None and (self._over or self._snapshots.due(self._seconds)):
            with self._clock.paused():
                self._snapshots.keep(model, self._seconds, step=state.global_step)

    def _agreed_seconds(self) -> float:
        if self._job.layout.processes == 1:
            return self._clock.seconds
        seconds = torch.tensor(self._clock.seconds, dtype=torch.float64)
        torch.distributed.broadcast(seconds, src=0)
        return float(seconds)
