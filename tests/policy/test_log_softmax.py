import numpy as np
import pytest
import torch

from tba.policy.log_softmax import choose, log_softmax_at

STATES, VOCABULARY = 5, 7
STATE, TOKEN = np.array([0, 0, 1, 2, 2, 2, 3, 4]), np.array([3, 3, 0, 6, 1, 1, 2, 5])
WEIGHTS = torch.linspace(0.5, 2.0, 2 * len(STATE)).view(2, -1)


def _chosen(strip, stops):
    return choose(STATE, TOKEN, torch.tensor(stops, dtype=torch.long), strip)


def _logits(dtype=torch.float32):
    logits = 3 * torch.randn(STATES, VOCABULARY, generator=torch.Generator().manual_seed(0))
    return logits.to(dtype).requires_grad_()


def _expected(logits, stops, temperature):
    log_probs = (logits / temperature).log_softmax(-1)[torch.from_numpy(STATE)]
    of_token = log_probs.gather(1, torch.from_numpy(TOKEN)[:, None])[:, 0]
    of_stop = log_probs[:, stops].logsumexp(-1) if stops else torch.zeros_like(of_token)
    return of_token, of_stop


@pytest.mark.parametrize("stops", [[], [6], [1, 5]])
@pytest.mark.parametrize("strip", [1, 2, 5, 100])
def test_values_and_gradient_equal_those_of_the_plain_computation(strip, stops):
    found, expected = (
        (lambda x: log_softmax_at(x * 1, _chosen(strip, stops), 0.7)),
        (lambda x: _expected(x, stops, 0.7)),
    )
    gradients = []
    for compute in (found, expected):
        logits = _logits()
        of_token, of_stop = compute(logits)
        (of_token * WEIGHTS[0] + of_stop * WEIGHTS[1]).sum().backward()
        gradients.append(logits.grad)
    for got, wanted in zip(found(_logits()), expected(_logits()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_logits_of_low_precision_give_float32_values_and_a_gradient_of_their_own_precision():
    logits = _logits(torch.bfloat16)
    of_token, _ = log_softmax_at(logits * 1, _chosen(2, []), 1.0)
    assert of_token.dtype == torch.float32
    wanted, _ = _expected(logits.detach().float(), [], 1.0)
    torch.testing.assert_close(of_token, wanted, rtol=1e-5, atol=1e-6)
    of_token.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_a_second_backward_pass_is_refused():
    of_token, _ = log_softmax_at(_logits() * 1, _chosen(2, []), 1.0)
    of_token.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        of_token.sum().backward()
