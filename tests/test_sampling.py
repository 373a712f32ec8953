from collections import Counter
from itertools import chain, permutations

import numpy as np
import pytest

from tba import sampling
from tba.buffer import ReplayBuffer
from tba.config.search import BufferConfig
from tba.run.rollouts import encode
from tba.sampling import choose_by_softmax, choose_newest, draw_batch, draw_in_epochs
from tests.factories import distinct, trajectory

ONCE = np.ones(9, dtype=np.int32)
"""Each sample was found once."""


def filled(*trajectories):
    buffer = ReplayBuffer(100)
    buffer.add(encode(trajectories))
    return buffer


def draw(buffer, b, k, generator, *, trainer_version=0, **settings):
    return draw_batch(
        buffer,
        queries_per_batch=b,
        samples_per_query=k,
        trainer_version=trainer_version,
        config=BufferConfig(**settings),
        generator=generator,
    )


def queries_of(buffer, batch):
    """Return the query id of each query of a batch."""
    rows = np.searchsorted(batch.query_of_row, np.arange(len(batch.prompts)))
    return buffer.queries_seen[buffer.field("query", batch.slots[rows])].tolist()


def within(observed, total, probability, sigmas=4.5):
    """Whether a count agrees with a binomial one."""
    spread = np.sqrt(total * probability * (1 - probability))
    return abs(observed - total * probability) <= sigmas * spread


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def two_syncs():
    """Six queries: 0, 1, 2 searched at versions 0 and 10, and 3, 4, 5 at version 0 alone."""
    old = [t for q in range(6) for t in distinct(q, 4, version=0)]
    new = [t for q in range(3) for t in distinct(q, 4, version=10, first=10)]
    return filled(*old, *new)


def softmax_inclusion(logits, count):
    """Enumerate the probability of each position to be among `count` drawn without replacement."""
    weights = np.exp(logits)
    inclusion = np.zeros(len(logits))
    for order in permutations(range(len(logits)), count):
        left, probability = weights.sum(), 1.0
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        inclusion[list(order)] += probability
    return inclusion


def test_softmax_choice_has_the_enumerated_inclusion_probabilities(rng):
    logits, draws = np.array([0.0, 1.0, -1.0, 2.0, 0.5]), 20_000
    counts = Counter(
        i for _ in range(draws) for i in choose_by_softmax(logits, ONCE[:5], 2, rng).tolist()
    )
    for i, probability in enumerate(softmax_inclusion(logits, 2)):
        assert within(counts[i], draws, probability)


def test_equal_logits_choose_every_subset_equally_often(rng):
    draws = 6_000
    for logit in (0.0, 1e30, -1e30, -np.inf):
        sets = Counter(
            tuple(sorted(choose_by_softmax(np.full(4, logit), ONCE[:4], 2, rng)))
            for _ in range(draws)
        )
        assert len(sets) == 6
        assert all(within(count, draws, 1 / 6) for count in sets.values())


def test_softmax_never_fails_on_underflow_or_hopeless_rewards(rng):
    logits = np.array([1e30, -np.inf, -1e5, -np.inf, 0.0])
    for _ in range(50):
        chosen = choose_by_softmax(logits, ONCE[:5], 4, rng).tolist()
        assert chosen[:3] == [0, 4, 2]
        assert chosen[3] in (1, 3)


def test_too_few_unique_samples_are_drawn_as_if_they_had_not_been_merged(rng):
    draws = 6_000
    sets = Counter(
        tuple(sorted(choose_by_softmax(np.zeros(2), np.array([2, 3]), 4, rng)))
        for _ in range(draws)
    )  # one of five finds is left out
    assert within(sets[0, 0, 1, 1], draws, 3 / 5)
    assert within(sets[0, 1, 1, 1], draws, 2 / 5)
    assert len(sets) == 2


def test_softmax_repeats_follow_the_reward_and_how_often_each_was_found(rng):
    draws, counts = 3_000, Counter()
    logits, found = np.log([0.7, 0.2, 0.1]), np.array([1, 3, 7])
    for _ in range(draws):
        counts.update(choose_by_softmax(logits, found, 12, rng).tolist())
    weights = np.array([0.7, 0.6, 0.7])
    for i, probability in enumerate(weights / weights.sum()):
        assert within(counts[i], 12 * draws, probability)


def test_enough_samples_are_chosen_without_regard_to_how_often_each_was_found(rng):
    draws, logits, found = 6_000, np.zeros(3), np.array([1, 1, 1_000])
    sets = Counter(tuple(sorted(choose_by_softmax(logits, found, 2, rng))) for _ in range(draws))
    assert all(within(sets[pair], draws, 1 / 3) for pair in ((0, 1), (0, 2), (1, 2)))
    everything = choose_by_softmax(logits, found, 3, rng)
    assert sorted(everything) == [0, 1, 2]


def newest(version, count, generator, *, recent_from=9, found=None):
    version = np.array(version)
    found = np.ones(len(version), dtype=np.int32) if found is None else np.array(found)
    return choose_newest(version, found, count, recent_from=recent_from, generator=generator)


def test_recent_samples_are_chosen_uniformly_and_alone(rng):
    version, draws = [3, 9, 9, 4, 9, 9], 6_000
    found = [5, 1, 1, 5, 9, 1]
    sets = Counter(tuple(sorted(newest(version, 2, rng, found=found))) for _ in range(draws))
    assert sorted(sets) == [(1, 2), (1, 4), (1, 5), (2, 4), (2, 5), (4, 5)]
    assert all(within(count, draws, 1 / 6) for count in sets.values())


def test_too_few_recent_samples_repeat_and_leave_older_ones_alone(rng):
    version = [3, 9, 2, 4, 9, 4]
    assert sorted(newest(version, 2, rng)) == [1, 4]
    assert set(newest(version, 6, rng).tolist()) <= {1, 4}


def test_too_few_recent_samples_are_drawn_as_if_they_had_not_been_merged(rng):
    draws = 6_000
    sets = Counter(
        tuple(sorted(newest([1, 9, 9], 3, rng, found=[50, 3, 1]))) for _ in range(draws)
    )  # three of four finds
    assert within(sets[1, 1, 1], draws, 1 / 4)
    assert within(sets[1, 1, 2], draws, 3 / 4)
    assert len(sets) == 2, "an older sample is no repeat of a recent one"


def test_too_few_samples_in_all_repeat_the_recent_ones_as_often_as_they_were_found(rng):
    draws, counts = 3_000, Counter()
    for _ in range(draws):
        counts.update(newest([1, 9, 9], 5, rng, found=[50, 3, 1]).tolist())
    assert within(counts[1], 5 * draws, 3 / 4)
    assert counts[1] + counts[2] == 5 * draws, "an older sample is no repeat of a recent one"


@pytest.mark.parametrize("m", [0, 1])
def test_a_search_batch_of_k_samples_is_drawn_as_it_was_found(rng, m):
    found = [trajectory(0, (token, 2)) for token in (4, 4, 4, 5, 5, 6, 7, 7)]
    batch = draw(filled(*found), 1, 8, rng, on_policy_prob=m)
    tokens = sorted(int(batch.tokens[row][0]) for row in batch.index[0])
    assert tokens == [4, 4, 4, 5, 5, 6, 7, 7]


def test_m_is_drawn_per_query(two_syncs, rng):
    draws = 2_000
    flags = np.array(
        [draw(two_syncs, 2, 2, rng, on_policy_prob=0.3).on_policy for _ in range(draws)]
    )
    for position in range(2):
        assert within(flags[:, position].sum(), draws, 0.3)
    assert within(flags.all(axis=1).sum(), draws, 0.09)


def test_the_on_policy_branch_takes_new_samples_of_the_newest_sync(two_syncs, rng):
    seen = Counter()
    for _ in range(900):
        batch = draw(two_syncs, 1, 4, rng, on_policy_prob=1)
        assert batch.on_policy.all()
        assert (batch.policy_version == 10).all()
        seen.update(queries_of(two_syncs, batch))
    assert sorted(seen) == [0, 1, 2]
    assert all(within(count, 900, 1 / 3) for count in seen.values())


def test_the_other_branch_takes_any_query_and_sample(two_syncs, rng):
    seen, samples = Counter(), Counter()
    for _ in range(1_800):
        batch = draw(two_syncs, 1, 4, rng, on_policy_prob=0)
        assert not batch.on_policy.any()
        seen.update(queries_of(two_syncs, batch))
        if queries_of(two_syncs, batch) == [0]:
            samples.update(batch.slots.tolist())
    assert all(within(seen[q], 1_800, 1 / 6) for q in range(6))
    assert all(within(samples[s], seen[0], 4 / 8) for s in two_syncs.samples(0))


def test_recency_counts_the_versions_in_the_buffer(rng):
    buffer = filled(*(t for q, v in ((0, 4), (1, 7), (2, 30)) for t in distinct(q, 3, version=v)))
    for versions, expected in ((1, {2}), (2, {1, 2}), (3, {0, 1, 2}), (9, {0, 1, 2})):
        seen = set()
        for _ in range(40):
            batch = draw(buffer, 1, 2, rng, on_policy_prob=1, recent_versions=versions)
            seen.update(queries_of(buffer, batch))
        assert seen == expected


def test_queries_of_a_batch_differ_while_there_are_enough(two_syncs, rng):
    for _ in range(50):
        assert sorted(queries_of(two_syncs, draw(two_syncs, 3, 2, rng, on_policy_prob=1))) == [
            0,
            1,
            2,
        ]
        assert len(set(queries_of(two_syncs, draw(two_syncs, 6, 2, rng, on_policy_prob=0)))) == 6
        batch = draw(two_syncs, 6, 2, rng, on_policy_prob=0.5)
        queries = np.array(queries_of(two_syncs, batch))
        others = queries[~batch.on_policy].tolist()
        assert len(set(others)) == len(others)
        assert batch.on_policy.sum() > 3 or len(set(queries.tolist())) == 6


def test_too_few_queries_repeat_and_each_keeps_rows_of_its_own(rng):
    buffer = filled(*distinct(0, 3), *distinct(1, 3))
    batch = draw(buffer, 5, 2, rng, on_policy_prob=0.5)
    assert set(queries_of(buffer, batch)) == {0, 1}
    assert batch.index.shape == (5, 2)
    np.testing.assert_array_equal(batch.query_of_row[batch.index], np.arange(5)[:, None] * [1, 1])
    assert buffer.field("uses", batch.slots).max() == 1, "one batch is one use"


def test_a_batch_stores_a_repeated_sample_once(rng):
    buffer = filled(trajectory(3, (4, 2), reward=2.0), trajectory(3, (5, 6, 2), reward=-1.0))
    batch = draw(buffer, 1, 7, rng, on_policy_prob=1)
    assert len(batch.tokens) == 2
    assert np.unique(batch.index).tolist() == [0, 1]
    assert batch.index.shape == (1, 7)
    assert [t.tolist() for t in batch.tokens] == [[4, 2], [5, 6, 2]]
    assert batch.reward.tolist() == [2.0, -1.0]
    assert batch.prompts[0].tolist() == [1, 13]
    assert batch.select([0]).index.tolist() == batch.index.tolist()
    assert [a.dtype.name for a in (batch.tokens[0], batch.log_mu[0], batch.reward)] == [
        "int32",
        "float32",
        "float32",
    ]


@pytest.mark.parametrize("m", [0, 1])
def test_repeats_in_a_batch_are_as_if_duplicates_had_not_been_merged(rng, m):
    often, seldom = trajectory(0, (4, 2), reward=1.0), trajectory(0, (5, 2), reward=0.0)
    buffer = filled(*[often] * 5, seldom)
    rewards = [draw(buffer, 1, 8, rng, on_policy_prob=m) for _ in range(1_500)]
    hits = sum(int(batch.reward[batch.index].sum()) for batch in rewards)
    assert within(hits, 8 * 1_500, 5 / 6)


def test_a_batch_is_a_copy(rng):
    buffer = filled(trajectory(0, (4, 2)))
    batch = draw(buffer, 1, 2, rng)
    buffer.set_log_ref(batch.slots, [np.float32([-9, -9])], reference_version=5)
    assert batch.log_ref[0].tolist() == [-1, -1]


def test_samples_over_the_staleness_bound_are_passed_over_and_kept(two_syncs, rng):
    for m in (0, 0.5, 1):
        for _ in range(30):
            batch = draw(
                two_syncs, 4, 6, rng, trainer_version=12, max_staleness=2, on_policy_prob=m
            )
            assert (12 - batch.policy_version <= 2).all()
            assert set(queries_of(two_syncs, batch)) == {0, 1, 2}
    assert draw(two_syncs, 4, 2, rng, trainer_version=13, max_staleness=2) is None
    assert len(two_syncs) == 36
    assert draw(two_syncs, 4, 2, rng, trainer_version=13) is not None


def test_a_sample_is_drawn_in_at_most_max_reuse_batches(rng):
    buffer = filled(*(t for q in range(4) for t in distinct(q, 4, version=q)))
    uses = Counter()
    while batch := draw(buffer, 2, 2, rng, max_reuse=3, off_policy_sampling="softmax_reward"):
        uses.update(np.unique(batch.slots).tolist())
    assert list(uses.values()) == [3] * 16, "nothing is left over, nothing is overdrawn"
    buffer.add(encode(distinct(2, 1, first=77)))
    assert queries_of(buffer, draw(buffer, 1, 2, rng, max_reuse=3)) == [2]
    assert draw(buffer, 1, 2, rng) is not None


def test_used_up_recent_samples_leave_the_on_policy_branch_to_the_other(rng):
    buffer = filled(*distinct(0, 2, version=1), *distinct(1, 2, version=9))
    flags = [draw(buffer, 1, 2, rng, on_policy_prob=1, max_reuse=1).on_policy for _ in range(2)]
    assert np.concatenate(flags).tolist() == [True, False]


def test_an_empty_buffer_gives_no_batch(rng):
    assert draw(ReplayBuffer(4), 2, 2, rng) is None


def test_softmax_prefers_high_rewards_of_a_query(rng):
    rewards = [0.0, 0.0, 0.0, 1.0]
    buffer = filled(*(trajectory(0, (i,), reward=r) for i, r in enumerate(rewards)))
    settings = {
        "on_policy_prob": 0,
        "off_policy_sampling": "softmax_reward",
        "reward_temperature": 0.5,
    }
    hits = sum(1.0 in draw(buffer, 1, 2, rng, **settings).reward for _ in range(3_000))
    assert within(hits, 3_000, softmax_inclusion(np.array(rewards) / 0.5, 2)[3])


def test_the_same_generator_draws_the_same_batch(two_syncs):
    a, b = (draw(two_syncs, 4, 3, np.random.default_rng(5)) for _ in range(2))
    assert a.slots.tolist() == b.slots.tolist()
    assert a.index.tolist() == b.index.tolist()


def mixed(query, version=0):
    """Two samples of a query, one right and one wrong."""
    return [
        trajectory(query, (4, 2), reward=1.0, version=version),
        trajectory(query, (5, 2), reward=0.0, version=version),
    ]


@pytest.mark.parametrize("m", [0, 0.5, 1])
def test_queries_with_equal_rewards_are_passed_over_while_there_are_others(rng, m):
    buffer = filled(*(t for q in range(9) for t in (mixed(q) if q % 3 == 0 else distinct(q, 2))))
    for _ in range(50):
        batch = draw(buffer, 3, 2, rng, on_policy_prob=m, skip_equal_rewards=True)
        assert sorted(queries_of(buffer, batch)) == [0, 3, 6]
    seen = {
        q for _ in range(50) for q in queries_of(buffer, draw(buffer, 3, 2, rng, on_policy_prob=m))
    }
    assert seen == set(range(9)), "unless nobody asks for it"


@pytest.mark.parametrize("m", [0, 1])
def test_queries_with_equal_rewards_fill_a_batch_that_has_too_few_others(rng, m):
    buffer = filled(*mixed(0), *(t for q in range(1, 6) for t in distinct(q, 2)))
    batch = draw(buffer, 4, 2, rng, on_policy_prob=m, skip_equal_rewards=True)
    queries = queries_of(buffer, batch)
    assert len(set(queries)) == 4
    assert 0 in queries
    assert draw(filled(*distinct(1, 2)), 1, 2, rng, skip_equal_rewards=True) is not None


def test_only_so_many_queries_with_equal_rewards_are_looked_at(rng, monkeypatch):
    buffer = filled(*(t for q in range(500) for t in distinct(q, 1)))
    looked_at = []
    monkeypatch.setattr(sampling, "_all_equal", lambda rewards: looked_at.append(1) or True)
    batch = draw(buffer, 5, 1, rng, on_policy_prob=0, skip_equal_rewards=True)
    assert len(set(queries_of(buffer, batch))) == 5
    assert len(looked_at) == 40


def test_recent_samples_alone_say_whether_the_m_branch_passes_over_a_query(rng):
    # Query 0 was answered rightly and wrongly, but lately only rightly; query 1 lately both ways.
    old, new = (
        trajectory(0, (5, 2), reward=0.0, version=1),
        trajectory(0, (4, 2), reward=1.0, version=9),
    )
    buffer = filled(old, new, *mixed(1, version=9))
    for _ in range(30):
        assert queries_of(
            buffer, draw(buffer, 1, 2, rng, on_policy_prob=1, skip_equal_rewards=True)
        ) == [1]
    found = {
        queries_of(buffer, draw(buffer, 1, 2, rng, on_policy_prob=0, skip_equal_rewards=True))[0]
        for _ in range(30)
    }
    assert found == {0, 1}


# --- epochs -------------------------------------------------------------------------------------


def epochs(buffer, b, steps, *, k=1, max_reuse=None):
    """Return the queries of each batch."""
    batches = [
        draw_in_epochs(
            buffer,
            queries_per_batch=b,
            samples_per_query=k,
            max_reuse=max_reuse,
            generator=np.random.default_rng(step),
        )
        for step in range(steps)
    ]
    return [None if batch is None else queries_of(buffer, batch) for batch in batches]


def test_an_epoch_has_each_query_once_and_the_next_another_order():
    drawn = epochs(filled(*(trajectory(q) for q in range(12))), 3, 8)
    first, second = [*chain(*drawn[:4])], [*chain(*drawn[4:])]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_a_batch_across_two_epochs_repeats_no_query():
    drawn = epochs(filled(*(trajectory(q) for q in range(5))), 3, 10)
    assert all(len(set(batch)) == 3 for batch in drawn)
    counts = Counter(chain(*drawn))
    assert set(counts.values()) == {6}


def test_a_batch_larger_than_the_data_repeats_them_evenly():
    (batch,) = epochs(filled(*(trajectory(q) for q in range(3))), 7, 1)
    assert sorted(Counter(batch).values()) == [2, 2, 3]


def test_epochs_end_where_reuse_is_bounded():
    drawn = epochs(filled(*(trajectory(q) for q in range(4))), 2, 5, max_reuse=2)
    assert Counter(chain(*drawn[:4])) == dict.fromkeys(range(4), 2)
    assert drawn[4] is None


def test_the_first_query_of_an_epoch_is_any_with_equal_chance():
    firsts = Counter()
    for seed in range(600):
        buffer = filled(*(trajectory(q) for q in range(4)))
        generator = np.random.default_rng(seed)
        batch = draw_in_epochs(
            buffer, queries_per_batch=1, samples_per_query=1, max_reuse=None, generator=generator
        )
        firsts.update(queries_of(buffer, batch))
    assert all(within(firsts[q], 600, 0.25) for q in range(4))


def test_all_samples_of_a_query_are_drawn_where_there_are_k_of_them():
    buffer = filled(*(t for q in range(3) for t in distinct(q, 2)))
    batch = draw_in_epochs(
        buffer,
        queries_per_batch=2,
        samples_per_query=2,
        max_reuse=None,
        generator=np.random.default_rng(0),
    )
    assert len(batch.tokens) == 4
    assert not batch.on_policy.any()
