"""Supervised fine-tuning: the token mean of a whole batch, however it is cut."""

import math

import pytest
import torch

from tba.objectives.imitation import sft
from tba.objectives.metrics import reward_metrics


def batch(seed=0, queries=3, samples=2, tokens=5):
    """Ragged answers to several queries of unequal difficulty, NaN at padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (queries, samples, tokens)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (*shape[:2], 1), generator=generator)
    log_pi = -torch.rand(shape, generator=generator, dtype=torch.float64)
    log_pi *= torch.arange(1, queries + 1).view(-1, 1, 1)
    return log_pi.where(mask, math.nan).requires_grad_(), mask


def mean_tokens(mask):
    return mask.sum().item() / (mask.shape[0] * mask.shape[1])


def test_the_value_of_two_answers_of_unequal_length():
    log_pi = torch.tensor([[[-1.0, -2.0, -3.0]], [[-4.0, 9.0, 9.0]]])
    mask = torch.tensor([[[True, True, True]], [[True, False, False]]])
    # (1 + 2 + 3 + 4) / 4 tokens, not the mean of 6 / 3 and 4 / 1
    assert sft(log_pi, mask, 2.0).loss.item() == pytest.approx(2.5)


def test_the_gradient_is_that_of_finite_differences():
    log_pi, mask = batch()
    clean = log_pi.detach().where(mask, -1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sft(x, mask, mean_tokens(mask)).loss, clean)


def test_every_response_token_has_the_same_gradient_and_padding_none():
    log_pi, mask = batch()
    sft(log_pi, mask, mean_tokens(mask)).loss.backward()
    expected = torch.where(mask, -1.0 / mask.sum(), 0.0).double()
    torch.testing.assert_close(log_pi.grad, expected)


def test_it_is_the_plain_mean_over_the_tokens_of_several_queries():
    log_pi, mask = batch(seed=3)
    loss = sft(log_pi, mask, mean_tokens(mask)).loss
    torch.testing.assert_close(loss, -log_pi[mask].mean())


def test_micro_batches_of_unequal_lengths_add_up_to_the_batch():
    log_pi, mask = batch(seed=1, queries=4)
    whole = mean_tokens(mask)
    parts = [[0], [1, 3], [2]]
    lengths = [mean_tokens(mask[part]) for part in parts]
    assert max(lengths) > 1.2 * min(lengths), "else the test shows nothing"
    summed = sum(len(part) / 4 * sft(log_pi[part], mask[part], whole).loss for part in parts)
    torch.testing.assert_close(summed, sft(log_pi, mask, whole).loss)


def test_order_of_samples_and_queries_changes_nothing():
    log_pi, mask = batch(seed=2)
    turned = sft(log_pi.flip(0, 1), mask.flip(0, 1), mean_tokens(mask)).loss
    torch.testing.assert_close(turned, sft(log_pi, mask, mean_tokens(mask)).loss)


def test_one_sample_a_query_has_finite_reward_metrics():
    metrics = reward_metrics(torch.ones(3, 1))
    assert (metrics["reward_std"], metrics["equal_reward_share"]) == (0, 1)
