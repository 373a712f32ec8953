"""The initial policy of a run and first reference: loaded or built, and perhaps warm-started."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from tba.config import Config
from tba.policy.adapters import check_installed
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.run.durable import new_folder, storage_errors
from tba.tasks import load_task
from tba.warm_start import warm_start

log = logging.getLogger(__name__)


def initial_model(
    config: Config, folder: Path, device: torch.device, tell: Callable[[str], None]
) -> str:
    """Return the folder (or hub name) of the initial policy, making it where settings say so.

    What is made is complete once `folder` exists: it is written beside it and renamed.
    """
    if config.model.lora is not None:
        check_installed()  # before a warm start, not after it
    if config.model.build is None and config.warm_start.steps == 0:
        assert config.model.model_name_or_path is not None
        return config.model.model_name_or_path  # as it was given: ./name is no hub name
    if folder.exists():
        return str(folder)
    with storage_errors(f"initial model {folder}"):
        _make(config, folder, device, tell)
    return str(folder)


def _make(config: Config, folder: Path, device: torch.device, tell: Callable[[str], None]) -> None:
    with new_folder(folder, "initial model") as unfinished:
        source = config.model.model_name_or_path or str(unfinished)
        if config.model.build is not None:
            build_policy(config.model.build, unfinished, config.seed)
        if config.warm_start.steps > 0:
            tell(f"warm start: {config.warm_start.steps} supervised steps")
            _warm_start(config, source, unfinished, device)


def _warm_start(config: Config, source: str, target: Path, device: torch.device) -> None:
    policy = load_policy(source, config.model, device=device, dtype=torch.float32)
    task = load_task(config.task, policy.tokenizer, given="demonstrations")
    rows = list(zip([query.prompt_ids for query in task.train], task.demonstrated(), strict=True))
    loss = warm_start(policy, rows, config)
    log.info("warm start ended with a loss of %.4f", loss)
    policy.model.save_pretrained(target)
    policy.tokenizer.save_pretrained(target)
