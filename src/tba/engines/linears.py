"""Linear layers as search wants them: weights laid out for the hardware, or in eight bits.

Search computes no gradient, and trajectory balance needs no sampling probability that agrees with
the trainer's to the last bit. So the linear layers of a searcher's policy hold, beside the weights
that are published to them, a form of these that is quicker to multiply with:

    float32,   on CPUs in the blocked layout of oneDNN, which plain products make anew in each call
    bfloat16
    int8       weights rounded to 255 levels for each output, inputs for each row, since the first
               token of a text may have states a thousand times as large as others (oneDNN on
               CPUs, `torch._int_mm` on GPUs)
    float8     weights and inputs as float8_e4m3fn, scaled for each output and row; GPUs of the
               Hopper generation and later (`torch._scaled_mm`)

The published weights stay parameters of the model under their own names; when they have been
written, `refresh` derives the quick form anew. Where a gradient is wanted, they are used as they
are.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tba.config.search import Precision
from tba.errors import ConfigError

Quick = Callable[[Tensor, Tensor | None], Tensor]
"""(states [..., in], bias [out] or None) -> states @ weight.T + bias, [..., out]."""

_FEWEST_ROWS = 17
"""Rows below which `torch._int_mm` refuses; the rest is padding."""
_ZERO = 128
"""Level of zero among unsigned ones: with signed inputs, oneDNN falls back to plain loops for some
shapes, and on CPUs without AMX for all."""
_TINY = 1e-12


def quicken(model: PreTrainedModel, precision: Precision | None = None) -> PreTrainedModel:
    """Give the model's linear layers quick forms, in place; the same model is returned.

    Args:
        model: Its weights are on their device.
        precision: Of the products; by default that of the weights.

    Raises:
        ConfigError: The model's device has no such products.
    """
    make = _maker(model.device, precision or _precision_of(model))
    if make is None:
        return model
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D):
                setattr(parent, name, QuickLinear(child, make))
    return model


def check_precision(device: torch.device, precision: Precision | None) -> None:
    """Refuse products that a device does not have.

    Raises:
        ConfigError: It has none of this precision.
    """
    on_cpu = device.type == "cpu"
    if precision == "int8" and on_cpu and not torch.backends.mkldnn.is_available():
        raise ConfigError(
            "search.precision is int8, but this build of torch has no oneDNN, whose 8-bit "
            "products it needs on a CPU: use bfloat16 or float32"
        )
    if precision == "float8" and (on_cpu or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(
            f"search.precision is float8, but the searcher's device {device} has no 8-bit "
            "floating-point products: use int8 or bfloat16"
        )


def refresh(model: nn.Module) -> None:
    """Derive the quick forms from the weights as they are now."""
    for module in model.modules():
        if isinstance(module, QuickLinear):
            module.refresh()


class QuickLinear(nn.Module):
    """A linear layer with its own weights and a quick form of them."""

    def __init__(self, layer: nn.Module, make: Callable[[Float[Tensor, "out in"]], Quick]) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_parameter("weight", layer.get_parameter("weight"))
        self.register_parameter("bias", dict(layer.named_parameters()).get("bias"))
        self._transposed = isinstance(layer, Conv1D)  # GPT-2 keeps its weights [in, out]
        self._make = make
        self.refresh()

    def refresh(self) -> None:
        """Derive the quick form."""
        self._quick = self._make(self._matrix().detach())

    def forward(self, states: Float[Tensor, "*row in"]) -> Float[Tensor, "*row out"]:
        """Return states @ weight.T + bias."""
        if torch.is_grad_enabled():
            return linear(states, self._matrix(), self.bias)
        return self._quick(states, self.bias)

    def _matrix(self) -> Float[Tensor, "out in"]:
        return self.weight.T if self._transposed else self.weight


def _precision_of(model: PreTrainedModel) -> Precision | None:
    precisions: dict[torch.dtype, Precision] = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
    }
    return precisions.get(model.dtype)


def _maker(
    device: torch.device, precision: Precision | None
) -> Callable[[Float[Tensor, "out in"]], Quick] | None:
    """Return what makes the quick forms, None where the weights are as quick as they are."""
    check_precision(device, precision)
    if precision == "int8":
        return partial(_int8_on_cpu, _Levels()) if device.type == "cpu" else _int8_by_row
    if precision == "float8":
        return _float8
    return _blocked if device.type == "cpu" and _has_products(precision) else None


def _has_products(precision: Precision | None) -> bool:
    """Whether oneDNN multiplies in this precision on this CPU."""
    if precision is None or not torch.backends.mkldnn.is_available():
        return False
    return precision == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _blocked(weight: Float[Tensor, "out in"]) -> Quick:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def multiply(states: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")

    return multiply


class _Levels:
    """Inputs rounded to 255 levels a row, once for all layers that are given the same."""

    def __init__(self) -> None:
        self._states: Tensor | None = None

    def of(self, states: Float[Tensor, "*row in"]) -> tuple[Tensor, Float[Tensor, "*row 1"]]:
        """Return the levels, of which `_ZERO` means zero, and the step between them."""
        if states is not self._states:
            low, high = states.aminmax(dim=-1, keepdim=True)
            self._step = torch.maximum(-low, high).float().clamp_(min=_TINY) / 127
            signed = (states / self._step).round_().to(torch.int8)
            self._levels = signed.view(torch.uint8).bitwise_xor_(_ZERO)  # + 128
            self._states = states
        return self._levels, self._step


def _int8_on_cpu(inputs: _Levels, weight: Float[Tensor, "out in"]) -> Quick:
    rounded, scale = _rounded(weight.contiguous())
    packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    def multiply(states: Tensor, bias: Tensor | None) -> Tensor:
        levels, step = inputs.of(states)
        product = torch.ops.onednn.qlinear_pointwise(
            *(levels, 1.0, _ZERO, packed, scale, None, None),
            *(1.0, 0, states.dtype, "none", [], ""),
        )
        product.mul_(step)
        return product if bias is None else product.add_(bias)

    return multiply


def _int8_by_row(weight: Float[Tensor, "out in"]) -> Quick:
    rounded, scale = _rounded(weight)
    columns = rounded.T

    def multiply(states: Tensor, bias: Tensor | None) -> Tensor:
        rows = states.flatten(0, -2)
        levels, step = _rounded(rows)
        missing = max(0, _FEWEST_ROWS - len(rows))
        sums = torch._int_mm(pad(levels, (0, 0, 0, missing)), columns)[: len(rows)]
        product = (sums * step[:, None] * scale).to(states.dtype).view(*states.shape[:-1], -1)
        return product if bias is None else product + bias

    return multiply


def _rounded(rows: Float[Tensor, "row in"]) -> tuple[Tensor, Float[Tensor, " row"]]:
    """Round each row to 255 levels; return the levels and the step between them."""
    step = rows.abs().amax(1).float().clamp(min=_TINY) / 127
    return (rows / step[:, None]).round().to(torch.int8), step


def _float8(weight: Float[Tensor, "out in"]) -> Quick:
    small, scale = _shrunk(weight)
    columns = small.T  # column-major, as the product wants it

    def multiply(states: Tensor, bias: Tensor | None) -> Tensor:
        levels, step = _shrunk(states.flatten(0, -2))
        product = torch._scaled_mm(
            levels, columns, scale_a=step, scale_b=scale.T, out_dtype=torch.bfloat16
        ).view(*states.shape[:-1], -1)
        return product if bias is None else product + bias

    return multiply


def _shrunk(rows: Float[Tensor, "row in"]) -> tuple[Tensor, Float[Tensor, "row 1"]]:
    """Scale each row to the range of float8_e4m3fn; return the numbers and the scales."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    step = rows.abs().amax(1, keepdim=True).float().clamp(min=_TINY) / largest
    return (rows / step).to(torch.float8_e4m3fn), step
