from itertools import product

import pytest
import torch
from benchmarks.tree import Tree, at_states, at_tokens, log_posterior

TREE = Tree(words=2, depth=3)
END = 2
# By hand: lengths up to three, two words and the end.
RESPONSES = [
    (END,),
    *[(a, END) for a in range(2)],
    *[(a, b, END) for a, b in product(range(2), repeat=2)],
    *product(range(2), repeat=3),
]


def _logits(rows=2, tree=TREE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, tree.states, tree.words + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _reward(rows=2, tree=TREE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tree.responses, generator=generator, dtype=torch.float64)


def _node(prefix):
    node = 0
    for word in prefix:
        node = TREE.words * node + 1 + word
    return node


def _by_enumeration(log_probs):
    """Log-probability of each response of `RESPONSES`, token by token."""
    return torch.stack(
        [
            sum(log_probs[:, _node(response[:t]), token] for t, token in enumerate(response))
            for response in RESPONSES
        ],
        dim=1,
    )


def test_paths_are_the_responses_by_hand():
    states, tokens, mask = TREE.paths()
    assert (TREE.states, TREE.responses) == (7, 15)
    found = [tuple(t[m].tolist()) for t, m in zip(tokens, mask, strict=True)]
    assert found == RESPONSES
    for response, (state, real) in enumerate(zip(states, mask, strict=True)):
        prefixes = [_node(found[response][:t]) for t in range(len(found[response]))]
        assert state[real].tolist() == prefixes
    assert (states[~mask] == 0).all()


def test_the_size_of_the_benchmark_is_as_its_docstring_says():
    tree = Tree(words=4, depth=5)
    assert (tree.states, tree.responses) == (341, 1365)


def test_response_log_probs_agree_with_enumeration_and_sum_to_one():
    log_probs = _logits().log_softmax(-1)
    found = TREE.response_log_probs(log_probs)
    torch.testing.assert_close(found, _by_enumeration(log_probs))
    torch.testing.assert_close(found.exp().sum(1), torch.ones(2).double())


def test_log_probs_along_the_paths_sum_to_those_of_the_responses():
    states, tokens, mask = (part.expand(2, -1, -1) for part in TREE.paths())
    log_probs = _logits().log_softmax(-1)
    along = at_tokens(at_states(log_probs, states), tokens)
    sums = torch.where(mask, along, 0.0).sum(-1)
    torch.testing.assert_close(sums, TREE.response_log_probs(log_probs))


def test_posterior_sums_to_one_and_maximises_the_regularised_reward():
    beta = 0.5
    log_ref = TREE.response_log_probs(_logits().log_softmax(-1))
    reward = _reward()
    log_star, log_z = log_posterior(log_ref, reward, beta)
    torch.testing.assert_close(log_star.exp().sum(1), torch.ones(2).double())

    def regularised(log_pi):  # equation (1)
        return (log_pi.exp() * (reward - beta * (log_pi - log_ref))).sum(1)

    torch.testing.assert_close(regularised(log_star), beta * log_z)
    for seed in range(5):
        other = TREE.response_log_probs(_logits(seed=seed).log_softmax(-1))
        assert (regularised(other) < beta * log_z).all()


def test_sampling_frequencies_agree_with_the_distribution():
    samples = 40_000
    logits = _logits()
    generator = torch.Generator().manual_seed(2)
    uniform = torch.rand(2, samples, TREE.depth, generator=generator, dtype=torch.float64)
    drawn = TREE.draw(logits, uniform)
    probs = TREE.response_log_probs(logits.log_softmax(-1)).exp()
    for row in range(2):
        shares = torch.bincount(drawn[row], minlength=TREE.responses) / samples
        error = (probs[row] * (1 - probs[row]) / samples).sqrt()
        assert ((shares - probs[row]).abs() < 5 * error).all()


@pytest.mark.parametrize("response", range(15))
def test_uniform_numbers_walk_down_the_tree(response):
    # With equal logits, token a is taken by numbers in [a / 3, (a + 1) / 3).
    numbers = [(token + 0.5) / 3 for token in RESPONSES[response]]
    uniform = torch.tensor([[numbers + [0.0] * (TREE.depth - len(numbers))]])
    assert TREE.draw(torch.zeros(1, 7, 3), uniform).item() == response


def test_advantages_agree_with_enumeration():
    log_probs, reward = _logits().log_softmax(-1), _reward()
    probs = TREE.response_log_probs(log_probs).exp()

    def value(prefix):
        """Mean reward of the responses that begin with the prefix."""
        inside = [y[: len(prefix)] == prefix for y in RESPONSES]
        weight = probs * torch.tensor(inside)
        return (weight * reward).sum(1) / weight.sum(1)

    found = TREE.advantages(log_probs, reward)
    assert found.shape == (2, 7, 3)
    for prefix in ((), (0,), (1,), (0, 1), (1, 1)):
        for token in range(3):
            expected = value((*prefix, token)) - value(prefix)
            torch.testing.assert_close(found[:, _node(prefix), token], expected)


def test_gradient_reaches_the_states_that_were_visited_alone():
    table = _logits().requires_grad_()
    at_states(table, torch.tensor([[[0, 3]], [[1, 1]]])).sum().backward()
    counts = torch.zeros(2, 7, 1).double()
    counts[0, 0], counts[0, 3], counts[1, 1] = 1, 1, 2
    torch.testing.assert_close(table.grad, counts.expand(2, 7, 3))
