"""Near-duplicates are found exactly, and of two the better one stays."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.buffer import AddResult, ReplayBuffer
from tba.near_duplicates import edit_distances
from tba.run.rollouts import encode
from tests.factories import trajectory

END = 9
words = st.lists(st.integers(0, 3), max_size=7).map(tuple)


@cache
def levenshtein(a, b):
    """Return the edit distance by its recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    change = levenshtein(a[1:], b[1:]) + (a[0] != b[0])
    return min(change, levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1)


@given(st.lists(st.tuples(words, words), max_size=20))
@settings(deadline=None)
def test_distances_of_many_pairs_are_those_of_the_definition(pairs):
    first, second = ([np.array(pair[i], np.int32) for pair in pairs] for i in (0, 1))
    assert edit_distances(first, second).tolist() == [levenshtein(a, b) for a, b in pairs]


def near(a, b, share):
    return levenshtein(a, b) < share * (len(a) + len(b))


class Model:
    """The same buffer with plain lists: query -> [(body, reward)], oldest first."""

    def __init__(self, share, capacity):
        self.share, self.capacity, self.samples = share, capacity, {}

    def add(self, rows):
        latest = list(dict.fromkeys(reversed([(q, body) for q, body, _ in rows])))[::-1]
        reward = {(q, body): r for q, body, r in rows}
        for q, body in latest:
            self._add(self.samples.setdefault(q, []), body, reward[q, body])
        for samples in self.samples.values():
            del samples[: -self.capacity]

    def _add(self, samples, body, reward):
        if body in [own for own, _ in samples]:
            samples[:] = [s for s in samples if s[0] != body]
        elif rivals := [s for s in samples if near(s[0], body, self.share)]:
            size = len(body)
            rival = min(rivals, key=lambda s: levenshtein(s[0], body) / (len(s[0]) + size))
            if rival[1] >= reward:
                return
            samples.remove(rival)
        samples.append((body, reward))


arrivals = st.lists(st.tuples(st.integers(0, 1), words, st.integers(0, 3)), max_size=8)


@given(st.lists(arrivals, max_size=6), st.sampled_from([0.25, 0.4]), st.sampled_from([3, 100]))
@settings(max_examples=150, deadline=None)
def test_the_buffer_holds_what_comparing_all_with_all_would_leave(batches, share, capacity):
    buffer, model = ReplayBuffer(capacity, near_duplicate_share=share), Model(share, capacity)
    for rows in batches:
        result = buffer.add(encode([trajectory(q, (*body, END), r, 0) for q, body, r in rows]))
        model.add(rows)
        assert result.kept + result.duplicate == len(rows)
        buffer.check_valid()
    held = {}
    for number, q in enumerate(buffer.queries_seen.tolist()):
        slots = buffer.samples(number)
        bodies = [tuple(t.tolist()[:-1]) for t in buffer.tokens("token", slots)]
        held[q] = list(zip(bodies, buffer.field("reward", slots).tolist(), strict=True))
    assert held == model.samples


def test_a_better_near_duplicate_displaces_and_a_worse_one_is_counted():
    buffer = ReplayBuffer(10, near_duplicate_share=0.25)
    # 7 of 8 tokens alike: d = 1 < .25 * 16
    one, other = (1, 2, 3, 4, 5, 6, 7, 8, END), (1, 2, 3, 4, 5, 6, 7, 0, END)
    assert buffer.add(encode([trajectory(0, one, 0.5, 0)])) == AddResult(1, 0, 0)
    assert buffer.add(encode([trajectory(0, other, 0.5, 0)])) == AddResult(0, 1, 0)
    assert buffer.add(encode([trajectory(0, other, 0.6, 0)])) == AddResult(0, 1, 0)
    assert [t.tolist() for t in buffer.tokens("token", buffer.samples(0))] == [list(other)]
    assert buffer.add(encode([trajectory(1, one, 0.1, 0)])) == AddResult(1, 0, 0)  # another query


def test_an_equal_that_a_better_near_one_of_the_same_delivery_displaces_leaves_nothing_behind():
    buffer = ReplayBuffer(10, near_duplicate_share=0.25)
    one, other = (1, 2, 3, 4, 5, 6, 7, 8, END), (1, 2, 3, 4, 5, 6, 7, 0, END)
    buffer.add(encode([trajectory(0, one, 0.0, 0)]))
    both = encode([trajectory(0, one, 0.0, 0), trajectory(0, other, 1.0, 0)])
    assert buffer.add(both) == AddResult(0, 2, 0)
    assert [t.tolist() for t in buffer.tokens("token", buffer.samples(0))] == [list(other)]
    buffer.check_valid()


def test_an_index_grown_stale_is_made_anew(monkeypatch):
    monkeypatch.setattr("tba.near_duplicates._REBUILD_FROM", 0)
    buffer = ReplayBuffer(2, near_duplicate_share=0.25)
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = (*rng.integers(0, 1_000, 6).tolist(), END)
        buffer.add(encode([trajectory(0, tokens, 1.0, 0)]))
    buffer.check_valid()
    assert buffer._near._index.entries < 100
    twin = buffer.tokens("token", buffer.samples(0)[-1:])[0].tolist()
    twin[0] += 1
    assert buffer.add(encode([trajectory(0, tuple(twin), 0.0, 0)])).duplicate == 1


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_token_does_not_count(finished):
    buffer = ReplayBuffer(9, near_duplicate_share=0.25)
    long = tuple(range(20, 28))
    buffer.add(encode([trajectory(0, (*long, END), 1.0, 0)]))
    again = (*long[:7], END) if finished else (*long[:7], 99)
    assert buffer.add(encode([trajectory(0, again, 0.0, 0)])).duplicate == 1
