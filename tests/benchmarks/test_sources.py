import pytest
import torch
from benchmarks.sources import (
    QUERIES,
    SAMPLES,
    SOURCES,
    STALENESS,
    TREE,
    Paths,
    Sampler,
    by_source,
    make_world,
)
from benchmarks.tree import at_states, at_tokens

SEEDS = 2


def _policy(world, step):
    """A policy that differs at every step; the reference at step 0."""
    direction = torch.randn(world.log_ref.shape, generator=torch.Generator().manual_seed(9))
    return world.log_ref + 0.02 * step * direction


def _log_prob(logits, draws):
    state, token, _ = Paths().of(draws.response)
    return at_tokens(at_states(logits, state).log_softmax(-1), token)


def _rows(values, source):
    return by_source(values, SEEDS)[:, SOURCES.index(source)]


@pytest.fixture(scope="module")
def drawn():
    """The world, and the draws of 70 steps."""
    world = make_world(SEEDS)
    sampler = Sampler(world, Paths(), SEEDS, steps=70, advantages=True)
    return world, [sampler.draw(step, _policy(world, step)) for step in range(70)]


def test_sources_of_a_seed_share_its_world_and_seeds_differ():
    world = make_world(SEEDS)
    reward = by_source(world.reward, SEEDS)
    assert (reward == reward[:, :1]).all()
    assert (reward[0] != reward[1]).any()
    torch.testing.assert_close(make_world(1).reward, world.reward[: len(SOURCES) * QUERIES])


@pytest.mark.parametrize("source", ["on-policy", *STALENESS])
@pytest.mark.parametrize("step", [0, 5, 69])
def test_responses_come_from_the_policy_of_exactly_that_staleness(drawn, source, step):
    world, draws = drawn
    version = max(0, step - STALENESS.get(source, 0))
    expected = _log_prob(_policy(world, version), draws[step])
    torch.testing.assert_close(_rows(draws[step].log_mu, source), _rows(expected, source))


def test_uniform_draws_every_token_uniformly(drawn):
    _, draws = drawn
    log_mu = _rows(draws[3].log_mu, "uniform")
    torch.testing.assert_close(log_mu, torch.full_like(log_mu, 1 / (TREE.words + 1)).log())
    ended = torch.stack([_rows(one.response, "uniform") == 0 for one in draws]).double()
    share, count = 1 / (TREE.words + 1), ended.numel()
    assert abs(ended.mean() - share) < 5 * (share * (1 - share) / count) ** 0.5


@pytest.mark.slow
def test_the_buffer_trains_on_new_responses_or_on_any_found_so_far(drawn):
    world, draws = drawn
    newest = []
    for step, one in enumerate(draws):
        found = _rows(one.log_mu, "buffer")
        by_version = torch.stack(
            [_rows(_log_prob(_policy(world, past), one), "buffer") for past in range(step + 1)]
        )
        right = (by_version - found).abs().amax(-1) < 1e-4  # [version, seed, query, sample]
        assert right.any(0).all()
        newest.append(right[-1].all(-1))
    late = torch.stack(newest[20:]).double()
    assert abs(late.mean() - 0.5) < 5 * (0.25 / late.numel()) ** 0.5


def test_step_advantages_are_those_of_the_policy_that_sampled(drawn):
    world, draws = drawn
    step, lag = 69, STALENESS["stale 16"]
    table = TREE.advantages(_policy(world, step - lag).log_softmax(-1), world.reward)
    state, token, _ = Paths().of(draws[step].response)
    expected = at_tokens(at_states(table, state), token)
    found = _rows(draws[step].step_advantage, "stale 16")
    torch.testing.assert_close(found, _rows(expected, "stale 16"), rtol=1e-4, atol=1e-5)
    assert draws[step].response.shape[1] == SAMPLES


def test_a_seed_draws_the_same_whatever_other_seeds_there_are(drawn):
    _, draws = drawn
    world = make_world(1)
    alone = Sampler(world, Paths(), 1, steps=1, advantages=False).draw(0, _policy(world, 0))
    assert (alone.response == by_source(draws[0].response, SEEDS)[:1].flatten(0, 2)).all()
