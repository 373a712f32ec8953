"""Precision of the trainer's forward pass; weights, log-probabilities and losses are float32."""

import torch
from transformers import PreTrainedModel

_SMALLEST = 2_000_000
"""Parameters from which on bfloat16 is used on a CPU: it gains little below."""


def autocast_dtype(precision: str, model: PreTrainedModel) -> torch.dtype | None:
    """Return the type for autocast, None being none, for a value of `trainer.precision`.

    "auto" is bfloat16 on GPUs that have it, and on CPUs that multiply matrices of it in hardware
    for models that are large enough.
    """
    low = _pays(model) if precision == "auto" else precision == "bfloat16"
    return torch.bfloat16 if low else None


def _pays(model: PreTrainedModel) -> bool:
    if model.device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return _cpu_has_bfloat16() and model.num_parameters() >= _SMALLEST


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU has AVX-512 or AMX instructions for it."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
