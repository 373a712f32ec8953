import numpy as np
import pytest
import torch
from transformers import TopPLogitsWarper

from tba.engines.inverse_cdf import pick


def _naive(scores, uniform, temperature):
    """The first token whose cumulative probability exceeds the number, in float64."""
    probs = (scores.double() / temperature).softmax(-1)
    cumulative = probs.cumsum(-1)
    token = (cumulative[:, None, :] <= uniform.double()[:, :, None]).sum(-1)
    return token, probs.log().gather(1, token), cumulative


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("vocabulary", [5, 256, 257, 1_000, 1_024])
def test_tokens_and_log_probs_are_those_of_the_inverted_distribution(vocabulary, temperature):
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(7, vocabulary, generator=generator)
    uniform = torch.rand(7, 50, generator=generator)
    token, log_prob = pick(scores, uniform, temperature)
    expected, expected_log_prob, cumulative = _naive(scores, uniform, temperature)
    differs = token != expected
    for row, sample in zip(*torch.nonzero(differs, as_tuple=True), strict=True):
        edge = cumulative[row, torch.minimum(token, expected)[row, sample]]
        assert abs(edge - uniform[row, sample]) < 1e-6  # only rounding decides between the two
    assert differs.float().mean() < 0.01
    np.testing.assert_allclose(log_prob[~differs], expected_log_prob[~differs], atol=1e-5)


@pytest.mark.parametrize("vocabulary", [6, 600])
def test_a_token_without_probability_is_never_found(vocabulary):
    scores = torch.full((1, vocabulary), -torch.inf)
    possible = [vocabulary // 3, vocabulary // 2]
    scores[0, possible] = torch.tensor([0.0, 1.0])
    edges = torch.tensor([[0.0, 1e-8, 0.26894, 0.5, 1 - 2**-24]])
    token, log_prob = pick(scores, edges, 1.0)
    assert set(token.flatten().tolist()) <= set(possible)
    assert token[0, 0] == possible[0]
    assert token[0, -1] == possible[1]
    assert log_prob.isfinite().all()


def test_a_row_does_not_depend_on_those_computed_with_it(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 700, generator=generator)
    uniform = torch.rand(9, 4, generator=generator)
    together = pick(scores, uniform, 1.0)
    monkeypatch.setattr("tba.engines.inverse_cdf._CHUNK_ON_CPU", 1_500)
    for one, other in zip(together, pick(scores, uniform, 1.0), strict=True):
        assert torch.equal(one, other)


def test_temperature_zero_takes_the_most_likely_token_with_its_own_log_prob():
    scores = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    token, log_prob = pick(scores.bfloat16(), torch.rand(3, 2), 0.0)
    assert token.tolist() == [[best] * 2 for best in scores.bfloat16().argmax(-1).tolist()]
    expected = scores.bfloat16().float().log_softmax(-1).amax(-1)
    torch.testing.assert_close(log_prob[:, 0], expected)


@pytest.mark.parametrize("vocabulary", [7, 600])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.92])
def test_top_p_samples_from_what_transformers_leaves(vocabulary, top_p):
    scores = 2 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0))
    left = TopPLogitsWarper(top_p)(None, scores / 0.7).log_softmax(-1)
    assert 0 < (left == -torch.inf).sum() < left.numel()
    uniform = torch.linspace(0, 1, 20_001)[:-1].expand(3, -1)
    token, log_prob = pick(scores, uniform, 0.7, top_p)
    torch.testing.assert_close(log_prob, left.gather(1, token), rtol=0, atol=1e-5)
    for row in range(3):  # the shares of a grid of numbers are the probabilities
        share = torch.bincount(token[row], minlength=vocabulary) / uniform.shape[1]
        torch.testing.assert_close(share, left[row].exp(), rtol=0, atol=3e-4)
