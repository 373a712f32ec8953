import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from tba.policy import block_attention, blocks, packed
from tba.policy import log_probs as module
from tba.policy.loading import recompute_activations
from tba.policy.log_probs import response_log_probs
from tiny_models import EOS, FAMILIES, VOCABULARY, tiny_model

TEMPERATURE = 0.7


def _batch(seed=0, longest=9):
    """Three ragged prompts, seven ragged responses that end in EOS, the padding token too."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in (5, 2, 8)]
    lengths = (1, longest, 3, 2, 4, longest, 6)
    responses = [
        np.append(rng.integers(2, VOCABULARY, n - 1), EOS).astype(np.int32) for n in lengths
    ]
    return prompts, responses, np.array([0, 0, 0, 1, 2, 2, 2])


def _naive(model, prompts, responses, query_of_row):
    """One full row at a time, in the plainest way: no padding, no cache, no mask."""
    rows = []
    for response, query in zip(responses, query_of_row, strict=True):
        ids = torch.from_numpy(np.concatenate([prompts[query], response])).long()[None]
        logits = model(input_ids=ids, use_cache=False).logits[0] / TEMPERATURE
        start = len(prompts[query])
        log_probs = logits[start - 1 : -1].log_softmax(-1)
        rows.append(log_probs.gather(1, ids[0, start:, None])[:, 0])
    return rows


def _weighted(rows):
    """A scalar whose gradient tells every token from every other."""
    return sum(
        (row * torch.arange(1, len(row) + 1)).sum() * (1 + 0.1 * at) for at, row in enumerate(rows)
    )


def _gradients(model, scalar):
    model.zero_grad()
    scalar.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same_values_and_gradients(model, found, mask, expected):
    lengths = [len(row) for row in expected]
    assert mask.sum(1).tolist() == lengths
    assert (found[~mask] == 0).all()
    rows = [row[:length] for row, length in zip(found, lengths, strict=True)]
    for row, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, wanted, rtol=1e-5, atol=1e-6)
    want = _gradients(model, _weighted(expected))
    got = _gradients(model, _weighted(rows))
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max().item()
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_those_of_full_rows(family):
    model = tiny_model(family)
    prompts, responses, query_of_row = _batch()
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    expected = _naive(model, prompts, responses, query_of_row)
    _assert_same_values_and_gradients(model, found, mask, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_neither_values_nor_gradients(family):
    model = tiny_model(family)
    prompts, responses, query_of_row = _batch()
    expected = _naive(model, prompts, responses, query_of_row)
    recompute_activations(model)
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    _assert_same_values_and_gradients(model, found, mask, expected)


@pytest.mark.parametrize("overhead", [0, 10**9])
@pytest.mark.parametrize("segment", [3, 1000])
@pytest.mark.parametrize("narrow", [1, 5, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_however_tokens_are_cut_into_blocks_values_and_gradients_are_the_same(
    family, narrow, segment, overhead, monkeypatch
):
    monkeypatch.setitem(packed._OVERHEAD, "cpu", overhead)
    monkeypatch.setattr(blocks, "_SEGMENT", segment)
    monkeypatch.setattr(blocks, "_NARROW", narrow)
    model = tiny_model(family)
    prompts, responses, query_of_row = _batch()
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    expected = _naive(model, prompts, responses, query_of_row)
    _assert_same_values_and_gradients(model, found, mask, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_get_the_gradients_of_full_rows(family, checkpointing):
    model = tiny_model(family)
    with torch.random.fork_rng(devices=[]):
        maps = {
            name.rsplit(".", 1)[-1]
            for name, part in model.base_model.named_modules()
            if isinstance(part, nn.Linear | Conv1D)
        }
        config = LoraConfig(r=2, target_modules=maps, fan_in_fan_out=family == "gpt2")
        inject_adapter_in_model(config, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    prompts, responses, query_of_row = _batch()
    expected = _naive(model, prompts, responses, query_of_row)
    if checkpointing:
        recompute_activations(model)
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    _assert_same_values_and_gradients(model, found, mask, expected)
    assert all(("lora_" in name) == (p.grad is not None) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_by_fused_kernels_gives_the_same(family, monkeypatch):
    monkeypatch.setattr(block_attention, "_has_fused_kernels", lambda device: True)
    model = tiny_model(family)
    prompts, responses, query_of_row = _batch()
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    expected = _naive(model, prompts, responses, query_of_row)
    _assert_same_values_and_gradients(model, found, mask, expected)


@pytest.mark.parametrize("kept", [0, 100, 2**30])
def test_weights_that_are_kept_or_computed_again_give_the_same(kept, monkeypatch):
    monkeypatch.setitem(packed._OVERHEAD, "cpu", 0)  # several blocks
    monkeypatch.setattr(block_attention, "_MOST_KEPT", kept)
    model = tiny_model("qwen2")
    prompts, responses, query_of_row = _batch()
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    expected = _naive(model, prompts, responses, query_of_row)
    _assert_same_values_and_gradients(model, found, mask, expected)


def test_responses_of_one_token_alone_need_no_token_beyond_the_prompts():
    model = tiny_model("qwen2")
    prompts, _, query_of_row = _batch()
    responses = [np.array([row + 2], dtype=np.int32) for row in range(len(query_of_row))]
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    expected = _naive(model, prompts, responses, query_of_row)
    _assert_same_values_and_gradients(model, found, mask, expected)


@pytest.mark.parametrize("chunk_states", [1, 4])
def test_chunks_change_neither_values_nor_gradients(chunk_states, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_LOGITS", chunk_states * VOCABULARY)
    monkeypatch.setattr(module, "_STRIP_LOGITS", 3 * VOCABULARY)
    model = tiny_model("llama")
    prompts, responses, query_of_row = _batch()
    shuffled = np.array([6, 0, 4, 2, 1, 5, 3])
    responses, query_of_row = [responses[row] for row in shuffled], query_of_row[shuffled]
    found, mask = response_log_probs(
        model, prompts, responses, query_of_row, temperature=TEMPERATURE
    )
    expected = _naive(model, prompts, responses, query_of_row)
    _assert_same_values_and_gradients(model, found, mask, expected)


def test_end_of_sequence_has_log_prob_and_gradient_although_it_is_the_padding_token():
    model = tiny_model("llama")
    assert model.config.pad_token_id == EOS
    prompts, responses, query_of_row = _batch()
    found, mask = response_log_probs(model, prompts, responses, query_of_row, temperature=1.0)
    ends = [(row, len(response) - 1) for row, response in enumerate(responses)]
    assert all(responses[row][at] == EOS and mask[row, at] for row, at in ends)
    model.zero_grad()
    sum(found[row, at] for row, at in ends).backward()
    # The gradient of log softmax is 1 - p at the token itself and -p at each other one.
    head = model.lm_head.weight.grad
    assert (
        head[EOS].norm()
        > head[[token for token in range(VOCABULARY) if token != EOS]].norm(dim=1).max()
    )


def test_rows_with_prompts_of_their_own_have_the_log_probs_of_rows_that_share_them():
    model = tiny_model("qwen3")
    prompts, responses, query_of_row = _batch()
    own = [prompts[query] for query in query_of_row]
    shared, mask = response_log_probs(model, prompts, responses, query_of_row, temperature=1.0)
    apart = np.arange(len(responses))
    alone, _ = response_log_probs(model, own, responses, apart, temperature=1.0)
    torch.testing.assert_close(alone[mask], shared[mask])


def test_autocast_returns_float32_near_the_float32_values():
    model = tiny_model("llama")
    prompts, responses, query_of_row = _batch()
    exact, mask = response_log_probs(model, prompts, responses, query_of_row, temperature=1.0)
    rough, _ = response_log_probs(
        model, prompts, responses, query_of_row, temperature=1.0, autocast=torch.bfloat16
    )
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact)[mask].abs().max() < 0.2
