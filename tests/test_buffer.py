from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tba.buffer import ReplayBuffer
from tba.config.search import BufferConfig
from tba.records import FinishReason, Outcome
from tba.run.rollouts import RolloutLog, encode
from tba.sampling import draw_batch
from tba.slots import AddResult
from tests.factories import distinct, excluded, trajectory

CONFIG = BufferConfig(on_policy_prob=0.5, off_policy_sampling="softmax_reward", recent_versions=2)


def filled(*trajectories, capacity=100):
    buffer = ReplayBuffer(capacity)
    buffer.add(encode(trajectories))
    return buffer


def draw(buffer, seed=0, **bounds):
    return draw_batch(
        buffer,
        queries_per_batch=3,
        samples_per_query=2,
        trainer_version=buffer.newest_version,
        config=CONFIG.model_copy(update=bounds),
        generator=np.random.default_rng(seed),
    )


def tokens_of(buffer, number):
    return [t.tolist() for t in buffer.tokens("token", buffer.samples(number))]


def found_of(buffer, number=0):
    """Return how often each sample of a query was found, by its tokens."""
    found = buffer.field("found", buffer.samples(number)).tolist()
    return dict(zip(map(tuple, tokens_of(buffer, number)), found, strict=True))


def assert_same_batch(a, b):
    for name in ("reward", "policy_version", "reference_version", "index", "query_of_row"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name in ("prompts", "tokens", "log_mu", "log_ref"):
        for x, y in zip(getattr(a, name), getattr(b, name), strict=True):
            np.testing.assert_array_equal(x, y)


def test_every_column_comes_back_as_it_was_added():
    a = trajectory(5, (3, 4, 2), reward=0.25, version=7, reference_version=6)
    b = trajectory(9, (3,), reward=-1, version=8, finish_reason=FinishReason.LENGTH)
    buffer = filled(a, b)
    assert buffer.queries_seen.tolist() == [5, 9]
    slots = np.concatenate([buffer.samples(0), buffer.samples(1)])
    for name, expected in {
        "reward": [0.25, -1],
        "policy_version": [7, 8],
        "reference_version": [6, 0],
        "finished": [True, False],
        "uses": [0, 0],
    }.items():
        assert buffer.field(name, slots).tolist() == expected
    for column, name in {"token": "tokens", "log_mu": "log_mu", "log_ref": "log_ref"}.items():
        for got, original in zip(buffer.tokens(column, slots), (a, b), strict=True):
            np.testing.assert_array_equal(got, getattr(original, name))
    np.testing.assert_array_equal(buffer.prompt(1), b.prompt_ids)


def test_of_equal_sequences_the_newest_wins_within_and_across_batches():
    buffer = filled(*distinct(0, 3), trajectory(0, (0, 2), reward=5.0))
    assert tokens_of(buffer, 0) == [[1, 2], [2, 2], [0, 2]]
    draw(buffer)
    again = trajectory(0, (1, 2), reward=9.0, version=4, reference_version=3)
    assert buffer.add(encode([again])) == AddResult(kept=0, duplicate=1, excluded=0)
    assert tokens_of(buffer, 0) == [[2, 2], [0, 2], [1, 2]]
    slot = buffer.samples(0)[-1:]
    assert buffer.field("reward", slot) == 9.0
    assert buffer.field("policy_version", slot) == 4
    assert buffer.field("reference_version", slot) == 3
    assert buffer.field("uses", slot) == 0
    np.testing.assert_array_equal(buffer.tokens("log_ref", slot)[0], again.log_ref)
    buffer.check_valid()


def test_finds_of_one_version_are_counted_within_a_batch():
    a, b = trajectory(0, (4, 2)), trajectory(0, (5, 2))
    assert found_of(filled(a, b, a, a)) == {(5, 2): 1, (4, 2): 3}
    buffer = filled(trajectory(1, (4, 2)), a, a)
    assert buffer.queries_seen.tolist() == [1, 0]
    assert found_of(buffer, 0) == {(4, 2): 1}, "each query counts its own"
    assert found_of(buffer, 1) == {(4, 2): 2}


def test_finds_of_one_version_add_up_over_batches():
    a, b = trajectory(0, (4, 2), version=3), trajectory(0, (5, 2), version=3)
    buffer = filled(a, a, b)
    buffer.add(encode([a, trajectory(0, (6, 2), version=3)]))
    assert found_of(buffer) == {(5, 2): 1, (4, 2): 3, (6, 2): 1}
    buffer.add(encode([b, a, a]))
    assert found_of(buffer) == {(6, 2): 1, (5, 2): 2, (4, 2): 5}
    buffer.check_valid()


def test_finds_begin_afresh_with_the_version_that_found_it_last():
    def found(*versions):
        return [trajectory(0, (4, 2), version=version) for version in versions]

    buffer = filled(*found(1, 1, 1))
    buffer.add(encode(found(2, 2)))
    assert found_of(buffer) == {(4, 2): 2}
    buffer.add(encode(found(2, 3)))
    assert found_of(buffer) == {(4, 2): 1}
    buffer.add(encode(found(3, 2, 3)))
    assert found_of(buffer) == {(4, 2): 3}


def test_an_evicted_sample_takes_its_count_along():
    buffer = filled(*[trajectory(0, (4, 2))] * 3, *distinct(0, 2, first=10), capacity=2)
    assert found_of(buffer) == {(10, 2): 1, (11, 2): 1}
    buffer.add(encode([trajectory(0, (4, 2))]))
    assert found_of(buffer) == {(11, 2): 1, (4, 2): 1}


def test_equal_tokens_of_another_query_or_a_prefix_are_no_duplicates():
    buffer = filled(trajectory(0, (4, 2)), trajectory(1, (4, 2)), trajectory(0, (4,)))
    assert (buffer.kept, buffer.duplicate, len(buffer)) == (3, 0, 3)


def test_excluded_ones_are_counted_and_nothing_else():
    buffer = ReplayBuffer(100)
    batch = encode([*distinct(0, 2), excluded(1), excluded(1, Outcome.ERROR)])
    assert buffer.add(batch) == AddResult(kept=2, duplicate=0, excluded=2)
    assert buffer.add(encode([excluded(2)])) == AddResult(kept=0, duplicate=0, excluded=1)
    assert buffer.add(encode([])) == AddResult(kept=0, duplicate=0, excluded=0)
    assert buffer.queries_seen.tolist() == [0]
    assert (buffer.kept, buffer.excluded, len(buffer)) == (2, 3, 2)
    buffer.check_valid()


def test_the_oldest_of_a_full_query_are_evicted_and_no_others():
    buffer = filled(*distinct(0, 3), *distinct(1, 2), capacity=3)
    buffer.add(encode(distinct(0, 2, first=10)))
    assert tokens_of(buffer, 0) == [[2, 2], [10, 2], [11, 2]]
    assert tokens_of(buffer, 1) == [[0, 2], [1, 2]]
    buffer.add(encode(distinct(1, 9, first=20)))  # more at once than fit
    assert tokens_of(buffer, 1) == [[26, 2], [27, 2], [28, 2]]
    buffer.check_valid()


def test_the_newest_version_follows_evictions_and_replacements():
    buffer = filled(trajectory(0, (1,), version=9), trajectory(1, (1,), version=3), capacity=1)
    assert buffer.newest_version == 9
    assert list(buffer.recent(1)) == [0]
    buffer.add(encode([trajectory(0, (2,), version=2)]))  # a late arrival evicts version 9
    assert buffer.newest_version == 3
    assert list(buffer.recent(1)) == [1]
    assert sorted(buffer.recent(2)) == [0, 1]
    assert ReplayBuffer(1).newest_version == -1


def test_a_version_ceiling_lowers_what_lies_above_it():
    buffer = ReplayBuffer(10)
    late = [trajectory(0, (v,), version=v) for v in (3, 5, 8)]
    buffer.add(encode(late), version_ceiling=5)
    assert buffer.field("policy_version", buffer.samples(0)).tolist() == [3, 5, 5]
    buffer.check_valid()


def test_a_reference_of_the_lost_future_is_no_reference_also_after_another_resume():
    batch = encode([trajectory(0, (v,), version=v, reference_version=v) for v in (4, 8)])
    buffer, again = ReplayBuffer(10), ReplayBuffer(10)
    buffer.add(batch, version_ceiling=6)
    again.add(batch, version_ceiling=9)  # from a checkpoint that was made after resuming
    again.load_state(buffer.state())
    for resumed in (buffer, again):
        assert resumed.field("reference_version", resumed.samples(0)).tolist() == [4, -1]


def test_arena_space_of_dead_samples_is_used_again():
    buffer = ReplayBuffer(4)
    sizes = []
    for round_ in range(60):
        batch = [
            trajectory(q, np.full(100, 1000 * q + 4 * round_ + i))
            for q in range(4)
            for i in range(4)
        ]
        buffer.add(encode(batch))
        sizes.append(buffer.nbytes)
    assert len(buffer) == 16
    assert tokens_of(buffer, 3)[-1] == [3000 + 4 * 59 + 3] * 100
    buffer.check_valid()
    assert sizes[-1] == sizes[-30], "memory is steady"
    assert sizes[-1] < 16 * 100 * 12 * 10


def test_a_recomputed_reference_replaces_the_stored_one():
    buffer = filled(trajectory(0, (1, 2)), trajectory(0, (3, 4, 2)))
    slots = buffer.samples(0)
    fresh = [np.float32([-0.1, -0.2]), np.float32([-0.3, -0.4, -0.5])]
    buffer.set_log_ref(slots, fresh, reference_version=50)
    for got, expected in zip(buffer.tokens("log_ref", slots), fresh, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert buffer.field("reference_version", slots).tolist() == [50, 50]
    with pytest.raises(AssertionError):
        buffer.set_log_ref(slots[:1], [np.float32([0.0])], reference_version=51)


def test_state_survives_a_rebuild_and_leaves_out_what_is_gone():
    batches = [encode(distinct(q, 4)) for q in range(3)]
    buffer, rebuilt = ReplayBuffer(4), ReplayBuffer(4)
    for batch in batches:
        buffer.add(batch)
    batch = draw(buffer)
    buffer.set_log_ref(batch.slots, [-2 * np.ones_like(t) for t in batch.log_ref], 30)
    state = buffer.state()
    for batch in [*batches, encode(distinct(1, 2, first=50))]:  # after the checkpoint
        rebuilt.add(batch)
    rebuilt.load_state(state)
    rebuilt.check_valid()
    for number, lost in ((0, 0), (1, 2), (2, 0)):
        old, new = buffer.samples(number)[lost:], rebuilt.samples(number)[: 4 - lost]
        for name in ("uses", "reference_version"):
            assert buffer.field(name, old).tolist() == rebuilt.field(name, new).tolist()
        for a, b in zip(buffer.tokens("log_ref", old), rebuilt.tokens("log_ref", new), strict=True):
            np.testing.assert_array_equal(a, b)
    assert rebuilt.field("uses", rebuilt.samples(1)[-2:]).tolist() == [0, 0]
    ReplayBuffer(4).load_state(state)  # nothing of it is there


def test_a_rebuild_from_the_log_draws_the_same_batches(tmp_path):
    rng = np.random.default_rng(3)
    buffer, rebuilt = ReplayBuffer(6), ReplayBuffer(6)
    bounds = {"max_reuse": 4, "max_staleness": 9}
    with RolloutLog(tmp_path / "rollouts.arrows") as log:
        for version in range(40):
            batch = encode(
                [
                    trajectory(int(q), rng.integers(0, 3, size=rng.integers(1, 5)), rng.normal(), v)
                    for q in rng.integers(0, 9, size=12)
                    for v in (max(0, version - int(rng.integers(3))),)
                ]
                + [excluded(1)]
            )
            log.append(batch)
            buffer.add(batch)
            draw(buffer, seed=version, **bounds)
        for batch in log.read():
            rebuilt.add(batch)
    rebuilt.load_state(buffer.state())
    rebuilt.check_valid()
    assert (rebuilt.kept, rebuilt.duplicate, rebuilt.excluded) == (
        buffer.kept,
        buffer.duplicate,
        buffer.excluded,
    )
    counts = [found_of(buffer, number) for number in range(len(buffer.queries_seen))]
    assert max(max(found.values()) for found in counts) > 1
    assert [found_of(rebuilt, number) for number in range(len(counts))] == counts
    for seed in range(20):
        assert_same_batch(draw(buffer, seed, **bounds), draw(rebuilt, seed, **bounds))


@pytest.mark.parametrize("recent", [3, 90, 300])  # of 400 queries
def test_bounds_leave_the_queries_that_a_scan_finds(recent):
    rng = np.random.default_rng(recent)
    buffer = filled(*(t for q in range(400) for t in distinct(q, 2, version=q)))
    for _ in range(150):
        draw(buffer, seed=int(rng.integers(99)), max_staleness=recent)
    slots = [buffer.samples(number) for number in range(400)]
    for oldest in (None, 400 - recent):
        for uses in (None, 1, 3):
            found = buffer.eligible(oldest, uses)
            new = [[oldest is None or v >= oldest for v in versions_of(buffer, s)] for s in slots]
            free = [[uses is None or u < uses for u in buffer.field("uses", s)] for s in slots]
            drawable = {q for q in range(400) if any(map(all, zip(new[q], free[q], strict=True)))}
            assert len(found) == len(set(found)), "each is as likely as any other"
            assert set(found) >= drawable
            assert len(found) <= 6 * len(drawable), "trying them at random is quick"


def versions_of(buffer, slots):
    return buffer.field("policy_version", slots)


class BufferMachine(RuleBasedStateMachine):
    """Compare the buffer with a dict of lists: query_id -> [tokens, reward, version, uses, found].

    Batch by batch, so that within one batch all finds of one version count.
    """

    capacity = 4
    evict = "oldest"

    def __init__(self):
        super().__init__()
        self.buffer = ReplayBuffer(self.capacity, evict=self.evict)
        self.model = {}
        self.batches = []

    @rule(
        rows=st.lists(
            st.tuples(
                st.integers(0, 3),
                st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
                st.integers(-2, 2),
                st.integers(0, 5),
                st.booleans(),
            ),
            max_size=12,
        )
    )
    def add(self, rows):
        batch = encode(
            [
                trajectory(q, tokens, reward, version) if usable else excluded(q)
                for q, tokens, reward, version, usable in rows
            ]
        )
        self.batches.append(batch)
        found = Counter((q, tokens, version) for q, tokens, _, version, usable in rows if usable)
        for q, samples in self.model.items():
            found.update({(q, s[0], s[2]): s[4] for s in samples})
        replaced = 0
        for q, tokens, reward, version, usable in rows:
            if usable:
                samples = self.model.setdefault(q, [])
                before = len(samples)
                samples[:] = [s for s in samples if s[0] != tokens]
                replaced += before - len(samples)
                samples.append([tokens, reward, version, 0, found[q, tokens, version]])
        for samples in self.model.values():
            while len(samples) > self.capacity:
                worst = min(samples, key=lambda s: s[1])  # of equal ones the first, the oldest
                samples.remove(samples[0] if self.evict == "oldest" else worst)
        usable = sum(row[-1] for row in rows)
        assert self.buffer.add(batch) == AddResult(usable - replaced, replaced, len(rows) - usable)

    @rule(seed=st.integers(0, 99), reuse=st.sampled_from([None, 1, 3]))
    def draw(self, seed, reuse):
        batch = draw(self.buffer, seed, max_reuse=reuse)
        drawable = [
            s for samples in self.model.values() for s in samples if reuse is None or s[3] < reuse
        ]
        assert (batch is None) == (not drawable)
        if batch is None:
            return
        numbers = self.buffer.field("query", batch.slots)
        used = {
            (int(self.buffer.queries_seen[number]), tuple(tokens.tolist()))
            for number, tokens in zip(numbers, batch.tokens, strict=True)
        }
        for q, tokens in used:
            (sample,) = [s for s in self.model[q] if s[0] == tokens]
            assert reuse is None or sample[3] < reuse
            sample[3] += 1

    @rule()
    def rebuild(self):
        rebuilt = ReplayBuffer(self.capacity, evict=self.evict)
        for batch in self.batches:
            rebuilt.add(batch)
        rebuilt.load_state(self.buffer.state())
        self.buffer = rebuilt

    @invariant()
    def agrees_with_the_model(self):
        self.buffer.check_valid()
        assert len(self.buffer) == sum(map(len, self.model.values()))
        assert sorted(self.buffer.queries_seen.tolist()) == sorted(self.model)
        for number, q in enumerate(self.buffer.queries_seen.tolist()):
            slots = self.buffer.samples(number)
            columns = [
                [tuple(t) for t in tokens_of(self.buffer, number)],
                *(
                    self.buffer.field(n, slots)
                    for n in ("reward", "policy_version", "uses", "found")
                ),
            ]
            assert [list(s) for s in zip(*columns, strict=True)] == self.model[q]


class EvictingTheLowest(BufferMachine):
    """The same with eviction of the lowest reward."""

    evict = "lowest"


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestEvictingTheLowest = EvictingTheLowest.TestCase
TestEvictingTheLowest.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
