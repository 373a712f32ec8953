"""Adapters: what is trained, what is published, and what searchers make of it."""

import copy
import importlib.util

import numpy as np
import peft
import pytest
import torch
from torch import nn

from tba.config import LoraConfig
from tba.engines import Sampling
from tba.engines.linears import quicken
from tba.engines.merging import MergingEngine
from tba.engines.torch_engine import TorchEngine
from tba.errors import ConfigError
from tba.inputs import Anchor
from tba.policy.adapters import add_adapter, save_adapter, trained_parameters
from tba.policy.initial import initial_model
from tba.policy.loading import recompute_activations
from tba.policy.log_probs import response_log_probs
from tba.records import Query
from tiny_models import EOS, FAMILIES, VOCABULARY, tiny_model
from tiny_runs import tiny_config

LORA = LoraConfig(rank=2, alpha=6.0)


def adapted(family, settings=LORA, seed=0, size=0.1):
    """Return a tiny model whose adapters change something."""
    model = tiny_model(family)
    add_adapter(model, settings, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trained_parameters(model).values():
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return model


def rollouts():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, n).astype(np.int32) for n in (5, 2, 8)]
    responses = [
        np.append(rng.integers(2, VOCABULARY, n - 1), EOS).astype(np.int32)
        for n in (4, 1, 3, 2, 4, 3, 6)
    ]
    return prompts, responses, np.array([0, 0, 0, 1, 2, 2, 2])


def log_probs(model, prompts, responses, query_of_row):
    found, _ = response_log_probs(model, prompts, responses, query_of_row, temperature=1.0)
    return found


def padded_log_probs(model, prompts, responses, query_of_row):
    """Every row in full, padded on the right, in one pass of transformers' own."""
    rows = [np.concatenate([prompts[q], r]) for q, r in zip(query_of_row, responses, strict=True)]
    longest = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    ids = torch.tensor([[*row.tolist(), *[EOS] * (longest - len(row))] for row in rows])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    log_pi = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    width = max(map(len, responses))
    found = []
    for row, (query, response) in enumerate(zip(query_of_row, responses, strict=True)):
        start = len(prompts[query]) - 1
        own = log_pi[row, start : start + len(response)]
        found.append(nn.functional.pad(own, (0, width - len(own))))
    return torch.stack(found)


def gradients(model, values):
    """Return the gradients of a scalar that tells every token from every other."""
    model.zero_grad()
    (values * torch.linspace(0.5, 2, values.numel()).view_as(values)).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("base_model.model."): gradient for name, gradient in found.items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_peft_on_padded_rows(family, checkpointing, tmp_path):
    ours, batch = adapted(family), rollouts()
    save_adapter(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny_model(family), tmp_path, is_trainable=True)
    theirs.base_model.model.set_attn_implementation("sdpa")
    expected = padded_log_probs(theirs, *batch)
    wanted = gradients(theirs, expected)
    if checkpointing:
        recompute_activations(ours)
    found = log_probs(ours, *batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    got = gradients(ours, found)
    assert got.keys() == wanted.keys() == trained_parameters(ours).keys()
    for name, gradient in got.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head_is_adapted_and_nothing_changes_at_first(family):
    plain, model = tiny_model(family), tiny_model(family)
    before = torch.random.get_rng_state()
    add_adapter(model, LORA, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(log_probs(model, *rollouts()), log_probs(plain, *rollouts()))
    layers = {name.rpartition(".lora_")[0] for name in trained_parameters(model)}
    per_layer = {"gpt_neox": 4, "gpt2": 4}.get(family, 7)
    assert len(layers) == 2 * per_layer
    assert not any("lm_head" in name or "embed" in name for name in layers)
    again = tiny_model(family)
    add_adapter(again, LORA, seed=3)
    same = trained_parameters(again)
    assert all(
        torch.equal(weight, same[name]) for name, weight in trained_parameters(model).items()
    )


def test_named_layers_alone_are_adapted_and_others_are_told():
    model = tiny_model("llama")
    add_adapter(model, LoraConfig(target_modules=("q_proj", "1.mlp.up_proj")), seed=0)
    layers = {name.rpartition(".lora_")[0] for name in trained_parameters(model)}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    for wrong in ("lm_head", "embed_tokens", "proj"):
        with pytest.raises(ConfigError, match=rf"names {wrong}, .* gate_proj, k_proj, .*choose"):
            add_adapter(tiny_model("llama"), LoraConfig(target_modules=("q_proj", wrong)), seed=0)


def test_without_peft_one_sentence_names_the_extra_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sentence = r"model.lora is set, but the package peft is not installed: install the extra lora"
    with pytest.raises(ConfigError, match=sentence):
        add_adapter(tiny_model("llama"), LORA, seed=0)
    config = tiny_config(tmp_path, model={"lora": {}})
    with pytest.raises(ConfigError, match=sentence):
        initial_model(config, tmp_path / "model", torch.device("cpu"), print)
    assert not (tmp_path / "model").exists()


def merging(family, adapter, precision="float32"):
    """Return a searcher's engine, its model and its base, without an adapter taken yet."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    base, model = (tiny_model(family).to(dtype) for _ in range(2))
    quicken(model, precision)
    room = {name: torch.zeros_like(weight, dtype=dtype) for name, weight in adapter.items()}
    engine = MergingEngine(model, (EOS,), base=base, adapter=room, scale=LORA.scale)
    return engine, model, base


def take(engine, adapter):
    with torch.no_grad():
        for name, weight in engine.weights().items():
            weight.copy_(adapter[name])
    engine.refresh()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_searcher_generates_what_the_trainers_own_model_would(family):
    trainer = adapted(family)
    engine, model, base = merging(family, trained_parameters(trainer))
    before = copy.deepcopy(base.state_dict())
    take(engine, trained_parameters(adapted(family, seed=1)))
    take(engine, trained_parameters(trainer))
    torch.testing.assert_close(
        log_probs(model, *rollouts()), log_probs(trainer, *rollouts()), rtol=0, atol=1e-4
    )
    assert all(torch.equal(weight, before[name]) for name, weight in base.state_dict().items())
    prompts, *_ = rollouts()
    queries = [Query(i, "", prompt) for i, prompt in enumerate(prompts)]
    pair = [
        e.generate(queries, Sampling(3, 1.0, 6), torch.Generator().manual_seed(0))
        for e in (engine, TorchEngine(trainer, (EOS,)))
    ]
    flat = [[response for group in found for response in group] for found in pair]
    for ours, theirs in zip(*flat, strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.log_mu, theirs.log_mu, atol=1e-4)


def test_merging_anew_leaves_no_trace_of_earlier_adapters():
    last = trained_parameters(adapted("gpt2", seed=9))
    engine, model, _ = merging("gpt2", last)
    for seed in range(8):
        take(engine, trained_parameters(adapted("gpt2", seed=seed, size=10.0)))
    take(engine, last)
    fresh, fresh_model, _ = merging("gpt2", last)
    take(fresh, last)
    pairs = zip(model.parameters(), fresh_model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_quick_forms_are_made_of_the_merged_weights(family, precision):
    trainer = adapted(family)
    engine, model, _ = merging(family, trained_parameters(trainer), precision)
    with torch.no_grad():
        untouched = log_probs(model, *rollouts())
        take(engine, trained_parameters(trainer))
        found, exact = log_probs(model, *rollouts()), log_probs(trainer, *rollouts())
    assert (found - exact).abs().mean() < 0.1
    assert (found - exact).abs().mean() < 0.1 * (untouched - exact).abs().mean()


def test_an_anchor_copies_adapters_and_shares_what_is_frozen():
    model = adapted("llama")
    anchor = Anchor(model, every=2)
    assert anchor.weights().keys() == trained_parameters(model).keys()
    own = dict(anchor.model.named_parameters())
    for name, weight in model.named_parameters():
        assert (own[name] is weight) != weight.requires_grad
    with torch.no_grad():
        for weight in trained_parameters(model).values():
            weight.add_(1.0)
    anchor.follow(model, step=1)
    assert not torch.equal(log_probs(anchor.model, *rollouts()), log_probs(model, *rollouts()))
    anchor.follow(model, step=2)
    assert torch.equal(log_probs(anchor.model, *rollouts()), log_probs(model, *rollouts()))
