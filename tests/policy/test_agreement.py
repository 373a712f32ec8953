"""Models whose family does more than body and head are refused, the others are not."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
)

from tba.errors import ModelError
from tba.policy.agreement import check_agreement
from tba.policy.attention import register_attention
from tiny_models import FAMILIES, tiny_model

SHAPE = {
    "vocab_size": 28,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OTHERS = {
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.0625}),
    "nemotron": (NemotronForCausalLM, NemotronConfig, {}),
}


def random_model(model_class, config_class, own):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**SHAPE, **own))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn(parameter.shape))
    model.set_attn_implementation(register_attention())
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_agree_are_taken(family, dtype):
    check_agreement(family, tiny_model(family).to(dtype))


def test_another_family_that_agrees_is_taken():
    check_agreement("m", random_model(MistralForCausalLM, MistralConfig, {"sliding_window": 4}))


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_with_other_log_probabilities_is_refused(name):
    with pytest.raises(ModelError, match=f"The model {name} .* other log-probabilities on packed"):
        check_agreement(name, random_model(*OTHERS[name]))


def test_a_family_that_attends_twice_in_a_layer_is_refused():
    model = random_model(DiffLlamaForCausalLM, DiffLlamaConfig, {})
    with pytest.raises(ModelError, match="cannot be computed on packed tokens"):
        check_agreement("diffllama", model)


def test_a_head_of_another_scale_shows(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(
        "tba.policy.agreement.raw_logits", lambda model, states: model.lm_head(states) / 2
    )
    with pytest.raises(ModelError, match=r"by [\d.]+ nats on average"):
        check_agreement("m", model)
