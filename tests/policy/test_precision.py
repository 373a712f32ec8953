import pytest
import torch

from tba.policy import precision
from tba.policy.precision import autocast_dtype
from tiny_models import tiny_model


def test_what_is_set_is_what_is_done():
    model = tiny_model("llama")
    assert autocast_dtype("float32", model) is None
    assert autocast_dtype("bfloat16", model) is torch.bfloat16


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_auto_is_bfloat16_for_large_models_on_cpus_that_have_it(supported, large, monkeypatch):
    model = tiny_model("llama")
    smallest = model.num_parameters() + (0 if large else 1)
    monkeypatch.setattr(precision, "_SMALLEST", smallest)
    monkeypatch.setattr(precision, "_cpu_has_bfloat16", lambda: supported)
    expected = torch.bfloat16 if supported and large else None
    assert autocast_dtype("auto", model) is expected


def test_auto_leaves_a_tiny_model_in_float32_on_any_cpu():
    assert autocast_dtype("auto", tiny_model("gpt2")) is None
