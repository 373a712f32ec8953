"""The simulated buffer against the real one, fed with the same search batches."""

import itertools

import numpy as np
import pytest

from factories import trajectory
from tba.buffer import ReplayBuffer
from tba.config.search import BufferConfig
from tba.plan.profile import Responses
from tba.plan.simulated_buffer import NEW, Catalogue, Found, SimulatedBuffer
from tba.run.rollouts import encode
from tba.sampling import draw_batch

RESPONSES = Responses(
    lengths=[[3, 3, 3, 5, 5, 9], [4, 4, 6, 7, 8, 8], [5] * 6, [2, 3, 4, 5, 6, 7]],
    same=[[0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 3, 3], [0] * 6, [0, 1, 2, 3, 4, 5]],
)
QUERIES, SAMPLES, DRAWN_QUERIES, DRAWN_SAMPLES = 24, 6, 6, 5


def real_batch(found: Found, fresh: itertools.count):
    """Return trajectories of the same queries, lengths, versions and merging."""
    made = []
    for query, common, lengths in zip(found.queries, found.common, found.lengths, strict=True):
        for number, length in zip(common, lengths, strict=True):
            first = next(fresh) if number == NEW else int(number)
            tokens = (first, *[1] * (length - 1))
            made.append(trajectory(int(query), tokens, version=found.version))
    return encode(made)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_policy_prob": 0.95, "recent_versions": 2},
        {"on_policy_prob": 0.5, "recent_versions": 1, "capacity_per_query": 7},
        {"on_policy_prob": 0.3, "max_staleness": 3},
    ],
)
def test_draws_have_the_versions_and_tokens_of_the_real_buffer(settings):
    config = BufferConfig(**settings)
    generator = np.random.default_rng(0)
    catalogue = Catalogue(RESPONSES, SAMPLES, None, generator)
    real = ReplayBuffer(config.capacity_per_query)
    simulated = SimulatedBuffer(QUERIES, catalogue.most_common, config, generator)
    fresh = itertools.count(10)
    versions, tokens = {"real": [], "simulated": []}, {"real": [], "simulated": []}
    for version in range(300):
        found = catalogue.find(generator.choice(QUERIES, 4, replace=False), version)
        simulated.add(found)
        real.add(real_batch(found, fresh))
        drawn = simulated.draw(DRAWN_QUERIES, DRAWN_SAMPLES, version)
        batch = draw_batch(
            real,
            queries_per_batch=DRAWN_QUERIES,
            samples_per_query=DRAWN_SAMPLES,
            trainer_version=version,
            config=config,
            generator=generator,
        )
        if version >= 30:
            versions["real"].append(version - batch.policy_version[batch.index].ravel())
            versions["simulated"].append(version - drawn.versions.ravel())
            tokens["real"].append(sum(map(len, batch.tokens)))
            tokens["simulated"].append(drawn.tokens)
    assert np.mean(tokens["simulated"]) == pytest.approx(np.mean(tokens["real"]), rel=0.03)
    of_real, of_simulated = (np.concatenate(versions[name]) for name in ("real", "simulated"))
    for staleness in (0, 1, 3, 8):
        share = np.mean(of_real <= staleness)
        assert np.mean(of_simulated <= staleness) == pytest.approx(share, abs=0.04)


def test_as_many_samples_as_measured_are_just_those():
    found = Catalogue(RESPONSES, SAMPLES, None, np.random.default_rng(0)).find(np.arange(4), 7)
    assert np.sort(found.lengths).tolist() == RESPONSES.lengths
    assert np.sort(found.common).tolist() == [
        [-1, 0, 0, 0, 1, 1],
        [-1, -1, 0, 0, 1, 1],
        [0] * 6,
        [-1] * 6,
    ]
    assert found.version == 7


def test_twice_as_many_samples_are_each_twice():
    found = Catalogue(RESPONSES, 12, None, np.random.default_rng(0)).find(np.arange(4), 0)
    twice = [sorted(2 * row) for row in RESPONSES.lengths]
    assert np.sort(found.lengths).tolist() == twice


def test_a_sample_is_not_drawn_more_often_than_allowed():
    generator = np.random.default_rng(0)
    config = BufferConfig(max_reuse=1, on_policy_prob=1.0)
    catalogue = Catalogue(Responses([[2] * 6], [list(range(6))]), 6, None, generator)
    buffer = SimulatedBuffer(2, catalogue.most_common, config, generator)
    buffer.add(catalogue.find(np.arange(2), 0))
    drawn = [buffer.draw(2, 3, 0) for _ in range(3)]
    assert [batch is None for batch in drawn] == [False, False, True]
    assert [batch.tokens for batch in drawn[:2]] == [12, 12]
