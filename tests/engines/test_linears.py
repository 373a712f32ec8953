import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from tba.engines.linears import (
    QuickLinear,
    _int8_by_row,
    _int8_on_cpu,
    _Levels,
    _maker,
    quicken,
    refresh,
)
from tba.errors import ConfigError
from tiny_models import FAMILIES, tiny_model

CPU = torch.device("cpu")
ERRORS = {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.03}
"""Standard deviation of the error over that of the result."""


def _dtype(precision):
    return torch.float32 if precision == "float32" else torch.bfloat16


def _error(found, expected):
    return ((found.float() - expected).std() / expected.std()).item()


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("precision", ERRORS)
def test_products_are_near_those_in_float32(precision, bias, rows):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 96, bias=bias)
    states = torch.randn(1, rows, 64)
    expected = layer(states).detach()
    dtype = _dtype(precision)
    quick = QuickLinear(layer.to(dtype), _maker(CPU, precision))
    with torch.no_grad():
        found = quick(states.to(dtype))
    assert found.dtype == dtype
    assert found.shape == (1, rows, 96)
    assert _error(found, expected) < ERRORS[precision]


@pytest.mark.parametrize("make", [_int8_by_row, partial(_int8_on_cpu, _Levels())])
@pytest.mark.parametrize("rows", [3, 20])
def test_int8_rounds_each_row_by_itself(rows, make):
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64), torch.randn(96)
    states = torch.randn(rows, 64) * torch.logspace(-3, 3, rows)[:, None]
    found = make(weight)(states, bias)
    for row in range(rows):
        assert _error(found[row] - bias, states[row] @ weight.T) < ERRORS["int8"]


def test_gpt2s_transposed_layers_are_understood():
    torch.manual_seed(0)
    layer = Conv1D(96, 64)
    states = torch.randn(5, 64)
    expected = layer(states).detach()
    quick = QuickLinear(layer, _maker(CPU, "int8"))
    with torch.no_grad():
        assert _error(quick(states), expected) < ERRORS["int8"]
    torch.testing.assert_close(quick(states), expected)  # with gradient: the weights themselves


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keep_names_and_are_published_to(family, precision):
    model, donor = (tiny_model(family, seed).to(_dtype(precision)) for seed in (0, 1))
    names = [name for name, _ in model.named_parameters()]
    quick = quicken(copy.deepcopy(model), precision)
    assert [name for name, _ in quick.named_parameters()] == names
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        before = quick(input_ids=ids).logits
        for name, weight in quick.named_parameters():
            weight.copy_(dict(donor.named_parameters())[name])
        refresh(quick)
        after = quick(input_ids=ids).logits
        fresh = quicken(donor, precision)(input_ids=ids).logits
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_float32_is_left_as_it_is_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = tiny_model("llama")
    assert not any(isinstance(m, QuickLinear) for m in quicken(model, "float32").modules())


def test_products_have_the_precision_of_the_weights_unless_told():
    def quick_layers(dtype):
        model = quicken(tiny_model("llama").to(dtype))
        return sum(isinstance(module, QuickLinear) for module in model.modules())

    assert quick_layers(torch.float32) > 0
    assert quick_layers(torch.float16) == 0  # oneDNN's are those of float32 and bfloat16


def test_float8_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"search\.precision is float8, but .* cpu has no 8-bit"):
        quicken(tiny_model("llama"), "float8")


_PRODUCTS = """
import torch
from tba.engines.linears import QuickLinear, _maker
torch.set_grad_enabled(False)
for outputs in (192, 576):
    layer = torch.nn.Linear(576, outputs).bfloat16()
    quick = QuickLinear(layer, _maker(torch.device("cpu"), "int8"))
    for rows in (1, 2, 8):
        quick(torch.randn(1, rows, 576).bfloat16())
"""


@pytest.mark.parametrize("instructions", ["DEFAULT", "AVX512_CORE_BF16"])
def test_products_in_int8_never_fall_back_to_plain_loops(instructions):
    environment = {**os.environ, "ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": instructions}
    command = [sys.executable, "-c", _PRODUCTS]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    lines = [line for line in out.stdout.splitlines() if "exec,cpu,matmul" in line]
    assert len(lines) == 6
    if not torch.cpu._is_avx512_supported():
        pytest.skip("which products other CPUs have is not known")
    assert not [line for line in lines if ",ref" in line]


def test_int8_on_a_cpu_without_onednn_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"int8, but this build of torch has no oneDNN"):
        quicken(tiny_model("llama"), "int8")
