import numpy as np
import pytest
import torch

from tba.policy import Reference, response_log_probs
from tba.policy.log_probs import response_outputs
from tiny_models import EOS, VOCABULARY, tiny_model


def _rollouts():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in (4, 9, 2, 6)]
    responses = [
        np.append(rng.integers(2, VOCABULARY, n), EOS).astype(np.int32) for n in (0, 5, 3, 8, 1, 2)
    ]
    return prompts, responses, np.array([3, 0, 2, 0, 3, 2])  # no row asks query 1, rows unsorted


@pytest.mark.parametrize("budget", [1, 30, 16_384])
def test_log_ref_is_that_of_each_row_whatever_the_micro_batches(budget):
    model = tiny_model("llama")
    prompts, responses, query_of_row = _rollouts()
    reference = Reference(model, temperature=0.7, micro_batch_tokens=budget)
    found = reference.log_ref(prompts, responses, query_of_row)
    for row, query in enumerate(query_of_row):
        alone, _ = response_log_probs(
            model, [prompts[query]], [responses[row]], np.array([0]), temperature=0.7
        )
        np.testing.assert_allclose(found[row], alone[0].detach().numpy(), rtol=1e-5, atol=1e-6)
        assert found[row].dtype == np.float32


def test_micro_batches_stay_within_the_budget_of_tokens(monkeypatch):
    sizes = []
    inner = response_outputs

    def spy(model, prompts, responses, query_of_row, **settings):
        sizes.append(len(prompts))
        return inner(model, prompts, responses, query_of_row, **settings)

    monkeypatch.setattr("tba.policy.reference.response_outputs", spy)
    prompts, responses, query_of_row = _rollouts()
    # Query 0: 4 + 5 + 8 tokens, query 2: 2 + 3 + 2, query 3: 6 + 0 + 1.
    reference = Reference(tiny_model("llama"), temperature=1.0, micro_batch_tokens=24)
    reference.log_ref(prompts, responses, query_of_row)
    assert sizes == [2, 1]


def test_log_ref_leaves_no_gradient():
    model = tiny_model("llama")
    found = Reference(model, temperature=1.0).log_ref(*_rollouts())
    assert all(isinstance(values, np.ndarray) for values in found)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
