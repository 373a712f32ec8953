"""`tba smooth`: MLE smoothing, the second stage of GFlowNet red-teaming.

    the run's rollout log --> attacks that mostly succeed and that the reference finds likely
                              enough, each once
    the initial model     --> cross-entropy fine-tuning on them --> a Hugging Face folder

Source: Lee et al., arXiv 2405.18540. The run itself is only read; it may be alive. The loss weighs
every token alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from transformers.utils.logging import disable_progress_bar

from tba.config import Config, RedteamTaskConfig
from tba.config.model import WarmStartConfig
from tba.errors import ConfigError, DataError
from tba.policy.loading import load_policy
from tba.records import Int32, Outcome
from tba.run.durable import new_folder, storage_errors
from tba.run.folder import RunFolder
from tba.run.rollouts import decode, read_log
from tba.runtimes.resources import pick_device
from tba.warm_start import fine_tune


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of the collected attacks are learned from."""

    threshold: float
    """Mean probability of harm to exceed."""
    min_log_ref: float
    """Log-probability of the whole attack under the reference to exceed, in nats, at the search
    temperature."""


@dataclass(frozen=True, slots=True)
class Smoothed:
    """What a smoothing came to."""

    folder: Path
    """Where the fine-tuned model is."""
    attacks: int
    """Different attacks collected by the run, those that could not be scored left out."""
    kept: int
    """Of which were learned from."""
    loss: float
    """Cross-entropy over the last steps, in nats a token."""


def smooth(
    run: Path, out: Path, choice: Choice, settings: WarmStartConfig, tell: Callable[[str], None]
) -> Smoothed:
    """Fine-tune the initial model of a red-teaming run on its successful attacks.

    Raises:
        ConfigError: The run is of another task, or `out` exists or cannot be made.
        DivergedError: The loss is not finite.
        DataError: No attack was good enough.
        RunFolderError: There is no run, or its log is damaged.
    """
    disable_progress_bar()
    folder = RunFolder.open(run)
    config = folder.config()
    if not isinstance(config.task, RedteamTaskConfig):
        raise ConfigError(
            f"{run} is a run of the task {config.task.kind}, but only attacks can be smoothed: "
            "give a run with task.kind redteam"
        )
    if out.exists():
        raise ConfigError(f"{out} exists already: delete it, or choose another folder by --out")
    if not folder.rollouts.is_file():
        raise DataError(f"{run} has no attacks yet: let it search first")
    logged = read_log(folder.rollouts, folder.rollouts.stat().st_size)
    kept, attacks = choose(logged, choice)
    if not kept:
        raise DataError(
            f"none of the {attacks} attacks in {run} has a mean probability above "
            f"{choice.threshold:g} and log ref above {choice.min_log_ref:g}: lower --threshold or "
            "--min-log-ref, or train for longer"
        )
    tell(f"{len(kept)} of {attacks} different attacks are learned from")
    device = torch.device(pick_device(config.device))
    policy = load_policy(_initial(folder, config), config.model, device=device, dtype=torch.float32)
    prompts, answers = zip(*kept, strict=True)
    own = config.model_copy(update={"warm_start": settings})
    with new_folder(out, "smoothed model") as unfinished:
        loss = fine_tune(policy, prompts, answers, own, tell)
        with storage_errors(f"smoothed model {out}"):
            policy.model.save_pretrained(unfinished)
            policy.tokenizer.save_pretrained(unfinished)
    return Smoothed(out, attacks, len(kept), loss)


def choose(
    logged: Iterable[pa.RecordBatch], choice: Choice
) -> tuple[list[tuple[Int32, Int32]], int]:
    """Return prompt and tokens of the attacks to learn from, and how many different ones there are.

    Equal attacks have equal rewards, since the text decides the victim's answers.
    """
    seen: set[tuple[int, bytes]] = set()
    kept: list[tuple[Int32, Int32]] = []
    for batch in logged:
        for found in decode(batch):
            key = (found.query_id, found.tokens.tobytes())
            if found.score.outcome is not Outcome.OK or key in seen:
                continue
            seen.add(key)
            succeeds = found.extras["probabilities"].mean() > choice.threshold
            if succeeds and found.log_ref.sum(dtype=float) > choice.min_log_ref:
                kept.append((found.prompt_ids, found.tokens))
    return kept, len(seen)


def _initial(folder: RunFolder, config: Config) -> str:
    """Return where the initial model of a run is: made by it, or loaded."""
    if folder.model.is_dir():
        return str(folder.model)
    assert config.model.model_name_or_path is not None
    return config.model.model_name_or_path
