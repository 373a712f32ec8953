"""Which device and how many threads each process gets.

Two processes with a thread for every core each slow each other down tenfold (they wait for each
other's turns by spinning), so the cores are shared out: cores / processes, at least one.
"""

import os

import torch

from tba.config import Config, LocalRuntimeConfig
from tba.engines.linears import check_precision
from tba.errors import ConfigError


def pick_device(name: str) -> str:
    """Return the device a setting means; `auto` takes a GPU when there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no GPU here: use auto or cpu")
    return name


def searcher_devices(config: Config) -> list[str]:
    """Return the devices that searchers take in turn: those the trainer leaves, or its own."""
    trainer = pick_device(config.device)
    if config.device != "auto" or trainer == "cpu" or torch.cuda.device_count() == 1:
        return [trainer]
    return [f"cuda:{i}" for i in range(1, torch.cuda.device_count())]


def check_devices(config: Config) -> None:
    """Refuse, before anything is loaded, a precision of search that a searcher's device lacks.

    Raises:
        ConfigError: Some device has no such products.
    """
    for device in searcher_devices(config) if config.search.searchers else ():
        check_precision(torch.device(device), config.search.precision)


def available_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def trainer_threads(config: Config) -> int:
    """Return the trainer's share of the cores while searchers run."""
    if not isinstance(config.runtime, LocalRuntimeConfig):
        return available_cores()
    return config.runtime.trainer_threads or _share(config)


def searcher_threads(config: Config) -> int:
    """Return each searcher's share of the cores."""
    assert isinstance(config.runtime, LocalRuntimeConfig)
    return config.runtime.searcher_threads or _share(config)


def _share(config: Config) -> int:
    return max(1, available_cores() // (1 + config.search.searchers))
