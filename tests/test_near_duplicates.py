"""Near-duplicates are found exactly, and of two the better one stays."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.buffer import AddResult, ReplayBuffer
from tba.config.search import NearByCosine, NearByEditDistance
from tba.cosine import Cosine
from tba.edit_distance import EditDistance, as_text, marks_of
from tba.records import EMBEDDING
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


@given(st.lists(st.tuples(words, words), min_size=1, max_size=20))
@settings(deadline=None)
def test_marks_bound_the_distance_of_the_definition_from_below(pairs):
    for a, b in pairs:
        one, other = marks_of([as_text(np.array(own, np.int32)) for own in (a, b)])
        bits = [int(np.bitwise_count(own).sum()) for own in (one, other, one & other)]
        assert max(bits[:2]) - bits[2] <= levenshtein(a, b)


@given(st.lists(words, max_size=9), st.lists(words, max_size=5), st.sampled_from([0.1, 0.25, 0.4]))
@settings(deadline=None)
def test_what_is_near_and_how_far_is_what_the_definition_says(kept, arriving, share):
    held, new = ([as_text(np.array(own, np.int32)) for own in part] for part in (kept, arriving))
    measure = EditDistance(share)
    slots = np.arange(len(held))[::-1]
    measure.keep(slots, held)

    def expected(at, text):
        others = [*zip(slots.tolist(), held, strict=True), *((~i, new[i]) for i in range(at))]
        together = [(levenshtein(text, own), len(text) + len(own), n) for n, own in others]
        return sorted((d / of, n) for d, of, n in together if d < share * of)

    found = measure.near(new, slots)
    assert [sorted(own) for own in found] == [expected(*own) for own in enumerate(new)]


@pytest.mark.parametrize("tokens", [[0, 0xD800, 0xDFFF, 0x10FFFF], [1], []])
def test_every_token_of_a_vocabulary_is_a_character_of_its_own(tokens):
    text = as_text(np.array(tokens, np.int32))
    assert [ord(character) for character in text] == tokens
    assert np.bitwise_count(marks_of([text])).sum() == len(tokens)


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
    buffer, model = (
        ReplayBuffer(capacity, near_duplicates=NearByEditDistance(share=share)),
        Model(share, capacity),
    )
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
    buffer = ReplayBuffer(10, near_duplicates=NearByEditDistance(share=0.25))
    # 7 of 8 tokens alike: d = 1 < .25 * 16
    one, other = (1, 2, 3, 4, 5, 6, 7, 8, END), (1, 2, 3, 4, 5, 6, 7, 0, END)
    assert buffer.add(encode([trajectory(0, one, 0.5, 0)])) == AddResult(1, 0, 0)
    assert buffer.add(encode([trajectory(0, other, 0.5, 0)])) == AddResult(0, 1, 0)
    assert buffer.add(encode([trajectory(0, other, 0.6, 0)])) == AddResult(0, 1, 0)
    assert [t.tolist() for t in buffer.tokens("token", buffer.samples(0))] == [list(other)]
    assert buffer.add(encode([trajectory(1, one, 0.1, 0)])) == AddResult(1, 0, 0)  # another query


def test_an_equal_that_a_better_near_one_of_the_same_delivery_displaces_leaves_nothing_behind():
    buffer = ReplayBuffer(10, near_duplicates=NearByEditDistance(share=0.25))
    one, other = (1, 2, 3, 4, 5, 6, 7, 8, END), (1, 2, 3, 4, 5, 6, 7, 0, END)
    buffer.add(encode([trajectory(0, one, 0.0, 0)]))
    both = encode([trajectory(0, one, 0.0, 0), trajectory(0, other, 1.0, 0)])
    assert buffer.add(both) == AddResult(0, 2, 0)
    assert [t.tolist() for t in buffer.tokens("token", buffer.samples(0))] == [list(other)]
    buffer.check_valid()


def test_a_slot_that_is_used_again_is_compared_by_what_it_holds_now():
    buffer = ReplayBuffer(2, near_duplicates=NearByEditDistance(share=0.25))
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = (*rng.integers(0, 1_000, 6).tolist(), END)
        buffer.add(encode([trajectory(0, tokens, 1.0, 0)]))
    buffer.check_valid()
    twin = buffer.tokens("token", buffer.samples(0)[-1:])[0].tolist()
    twin[0] += 1
    assert buffer.add(encode([trajectory(0, tuple(twin), 0.0, 0)])).duplicate == 1


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_token_does_not_count(finished):
    buffer = ReplayBuffer(9, near_duplicates=NearByEditDistance(share=0.25))
    long = tuple(range(20, 28))
    buffer.add(encode([trajectory(0, (*long, END), 1.0, 0)]))
    again = (*long[:7], END) if finished else (*long[:7], 99)
    assert buffer.add(encode([trajectory(0, again, 0.0, 0)])).duplicate == 1


# --- by embedding -----------------------------------------------------------------------------


def embedded(query, body, reward, embedding):
    found = trajectory(query, (*body, END), reward, 0)
    told = {"probabilities": np.ones(2, np.float32), EMBEDDING: np.array(embedding, np.float32)}
    return replace(found, extras=told)


directions = st.sampled_from([(1, 0, 0), (0, 2, 0), (1, 1, 0), (3, 1, 0), (0, 1, 1), (0, 0, 0)])
told = st.lists(st.tuples(st.integers(0, 1), words, st.integers(0, 3), directions), max_size=8)


def cosine(a, b):
    """Return the cosine by its definition, in float64; that of a zero is zero."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def add_plainly(held, rows, above):
    """Add to {query: {body: (reward, embedding)}}, oldest first, by comparing all with all."""
    latest = {(q, body): (reward, embedding) for q, body, reward, embedding in rows}
    for q, body in list(dict.fromkeys(reversed([row[:2] for row in rows])))[::-1]:
        reward, embedding = latest[q, body]
        own = held.setdefault(q, {})
        if own.pop(body, None) is None and own:
            cosines = [round(cosine(e, embedding), 6) for _, e in own.values()]
            rival = list(own)[int(np.argmax(cosines))]  # of equally near ones the oldest
            if max(cosines) > above:
                if own[rival][0] >= reward:
                    continue
                del own[rival]
        own[body] = (reward, embedding)


@given(st.lists(told, max_size=6), st.sampled_from([0.4, 0.8]))
@settings(max_examples=150, deadline=None)
def test_by_cosine_too_the_buffer_holds_what_comparing_all_with_all_would_leave(batches, above):
    buffer, held = ReplayBuffer(100, near_duplicates=NearByCosine(above=above)), {}
    for rows in batches:
        result = buffer.add(encode([embedded(*row) for row in rows]))
        add_plainly(held, rows, above)
        assert result.kept + result.duplicate == len(rows)
        buffer.check_valid()
    for position, q in enumerate(buffer.queries_seen.tolist()):
        slots = buffer.samples(position)
        bodies = [tuple(t.tolist()[:-1]) for t in buffer.tokens("token", slots)]
        rewards = buffer.field("reward", slots).tolist()
        expected = {body: reward for body, (reward, _) in held[q].items()}
        assert dict(zip(bodies, rewards, strict=True)) == expected


def test_embeddings_are_compared_in_parts_as_in_one(monkeypatch):
    rows = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    measure = Cosine(0.3)
    measure.keep(np.arange(40), rows[:40])
    monkeypatch.setattr("tba.cosine._SLOTS_AT_ONCE", 7)
    found = measure.near(rows[40:], np.arange(40))
    for at, own in enumerate(found):
        others = [*range(40), *(~i for i in range(at))]
        vectors = [rows[n] if n >= 0 else rows[40 + ~n] for n in others]
        cosines = [cosine(rows[40 + at].tolist(), v.tolist()) for v in vectors]
        expected = {n: 1 - c for n, c in zip(others, cosines, strict=True) if c > 0.3}
        assert {n: d for d, n in own} == pytest.approx(expected, abs=2e-6)
