"""What this machine has and what it lacks: versions, device, threads, memory, disk, extras."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

CORE = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "pydantic",
    "typer",
    "rich",
    "jaxtyping",
    "math-verify",
    "rapidfuzz",
    "xxhash",
)
"""Distributions without which nothing runs: the dependencies in `pyproject.toml`."""

EXTRAS = {
    "ray": ("ray",),
    "vllm": ("vllm",),
    "lora": ("peft",),
    "gym": ("reasoning-gym",),
    "verifiers": ("verifiers",),
    "report": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "dev": (
        "accelerate",
        "beartype",
        "gguf",
        "hypothesis",
        "matplotlib",
        "mypy",
        "peft",
        "pytest",
        "pytest-timeout",
        "reasoning-gym",
        "ruff",
        "trl",
    ),
}
"""Optional distributions by the extra that installs them."""

OLDEST_PYTHON = (3, 11)
INSTALL = "pip install -c constraints.txt"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    """What was looked at."""
    found: str
    """What was found."""
    remedy: str = ""
    """How to get what is missing; empty when nothing is."""
    is_fatal: bool = False
    """Whether the core needs what is missing."""


def examine() -> list[Finding]:
    """Look at everything; torch is imported on the way if there is one."""
    findings = [_python(), *map(_core, CORE)]
    if find_spec("torch") is not None:
        findings += _devices()
    return [*findings, *_machine(), *(_extra(name, needs) for name, needs in EXTRAS.items())]


def _python() -> Finding:
    is_old = sys.version_info < OLDEST_PYTHON
    remedy = f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or later" if is_old else ""
    return Finding("Python", platform.python_version(), remedy, is_fatal=is_old)


def _core(name: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(name, "missing", f"{INSTALL} -e .", is_fatal=True)
    return Finding(name, found)


def _extra(name: str, needs: tuple[str, ...]) -> Finding:
    missing = [need for need in needs if _version(need) is None]
    if missing:
        return Finding(
            f"extra {name}", f"without {', '.join(missing)}", f"{INSTALL} -e '.[{name}]'"
        )
    return Finding(f"extra {name}", ", ".join(f"{need} {_version(need)}" for need in needs))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    import torch

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        bfloat16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        memory = _gib(device.total_memory)
        yield Finding(f"device cuda:{index}", f"{device.name}, {memory}, {bfloat16}")
    # Not every torch that we admit can tell.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(name)]
    speed = f"bfloat16 by {bf16[0]}" if bf16 else "bfloat16 emulated, float32 is quicker"
    yield Finding("device cpu", f"{platform.machine()}, {speed}")
    yield Finding("threads", f"{torch.get_num_threads()} by default in this process")


def _machine() -> Iterator[Finding]:
    yield Finding("cores", str(len(os.sched_getaffinity(0))))
    yield Finding("memory", _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    yield Finding("free disk", f"{_gib(shutil.disk_usage(Path.cwd()).free)} in {Path.cwd()}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
