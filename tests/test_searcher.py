"""The searcher's box, S1 to S5, with a scripted engine and a scripted scorer."""

import multiprocessing
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from tba.annotations import Annotations, SearchTools
from tba.config.load import load_config
from tba.engines.base import Sampling
from tba.engines.fake import FakeEngine
from tba.errors import WaitTimeoutError
from tba.pace import Lane
from tba.records import FinishReason, Outcome, Query, Score
from tba.runtimes.lanes import SearchPlan
from tba.searcher import Judge, Searcher, Seat, Stage, Stores, Tickets, stream_seed
from tba.sync import WeightStore

EOS = 2
SAMPLING = Sampling(samples_per_query=3, temperature=0.7, max_completion_length=4)


def make_queries(count):
    return [
        Query(i, f"q{i}", np.array([1, 10 + i], dtype=np.int32), {"answer": i})
        for i in range(count)
    ]


def make_weights(value):
    return {"w": torch.full((4, 3), float(value)), "b": torch.full((5,), -float(value))}


class FakeTokenizer:
    def batch_decode(self, sequences, *, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(str(t) for t in tokens if t != EOS) for tokens in sequences]


class FakeScorer:
    """Scores by query and text; one kind of text fails."""

    def score(self, queries, texts, tokens):
        assert len(queries) == len(texts) == len(tokens)
        return [
            Score(Outcome.ERROR, float("nan"), f"cannot read {text}")
            if text.endswith("13")
            else Score(Outcome.OK, query.columns["answer"] + len(ids) / 10)
            for query, text, ids in zip(queries, texts, tokens, strict=True)
        ]


class FakeReference:
    """Its weight says which reference it is; a token's log-probability tells prompt and token."""

    def __init__(self):
        self._weights = {"r": torch.zeros(2)}

    def weights(self):
        return self._weights

    def log_ref(self, prompts, responses, query_of_row):
        return [
            np.float32(-1.0) * tokens
            - np.float32(100 * prompts[q][1])
            - self._weights["r"][0].numpy()
            for tokens, q in zip(responses, query_of_row, strict=True)
        ]


def script(query, sample):
    """Sample 0 stops, sample 1 fails in scoring, sample 2 never stops."""
    q = query.query_id
    return [[30 + q, EOS], [50 + q, 13, EOS], [70 + q] * 9][sample]


class Bench:
    """A searcher with all its surroundings."""

    def __init__(self, queries=6, per_batch=2, lane=5, seed=3):
        self.engine = FakeEngine(
            script,
            eos_token_id=EOS,
            log_mu=lambda q, j: [-q.query_id - j / 8] * 9,
            weights=make_weights(0),
        )
        self.reference = FakeReference()
        self.store = WeightStore(make_weights(0), torch.float32)
        self.reference_store = WeightStore(self.reference.weights(), torch.float32)
        self.queries = make_queries(queries)
        self.tickets = Tickets(self.queries, per_batch, seed)
        self.stages = []
        tools = SearchTools(
            self.engine,
            reference_engine=FakeEngine(script, eos_token_id=EOS),
            reference=self.reference,
            judge=Judge(FakeScorer(), FakeTokenizer()),
            sampling=SAMPLING,
            eos_ids=(EOS,),
        )
        self.searcher = Searcher(
            tools,
            Annotations({}, tools),
            learner=None,
            tickets=self.tickets,
            stores=Stores(self.store, self.reference_store),
            seat=Seat(lane, announce=self.stages.append, send=lambda batch: None),
        )

    def publish(self, version, value=None):
        self.store.publish(make_weights(version if value is None else value), version)
        self.store.flush()


@pytest.fixture
def bench():
    bench = Bench()
    bench.publish(0)
    return bench


# --- tickets ---------------------------------------------------------------------------------


def test_every_query_is_taken_once_an_epoch_in_an_order_of_its_own():
    tickets = Tickets(make_queries(12), 4, seed=1)
    epochs = [
        [q.query_id for ticket in range(3 * e, 3 * e + 3) for q in tickets.take(ticket)]
        for e in range(4)
    ]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_tickets_that_straddle_an_epoch_still_take_every_query_once_an_epoch():
    tickets, taken = Tickets(make_queries(10), 4, seed=1), Counter()
    for ticket in range(50):  # 20 epochs
        queries = [q.query_id for q in tickets.take(ticket)]
        assert len(set(queries)) == len(queries) <= 4
        taken.update(queries)
    assert all(count <= 20 for count in taken.values())
    assert sum(taken.values()) >= 190, "only a query met twice in one ticket is left out"


def test_a_ticket_alone_fixes_queries_and_random_stream():
    def made_of(tickets, ticket):
        numbers = torch.rand(8, generator=tickets.generator(ticket)).tolist()
        return [q.query_id for q in tickets.take(ticket)], numbers

    queries = make_queries(9)
    forward, backward = Tickets(queries, 4, seed=7), Tickets(queries, 4, seed=7)
    expected = [made_of(forward, ticket) for ticket in range(12)]
    assert [made_of(backward, ticket) for ticket in reversed(range(12))] == expected[::-1]
    assert [made_of(Tickets(queries, 4, seed=8), t) for t in range(12)] != expected


def test_more_queries_than_there_are_give_each_of_them_once():
    taken = Tickets(make_queries(3), 8, seed=0).take(5)
    assert sorted(q.query_id for q in taken) == [0, 1, 2]


def test_stream_seeds_differ_by_seed_purpose_and_number():
    seeds = {
        stream_seed(seed, purpose, number)
        for seed in range(5)
        for purpose in ("search", "epoch", "draw")
        for number in range(200)
    }
    assert len(seeds) == 5 * 3 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, "search", 11) != stream_seed(11, "search", 1)


@pytest.mark.parametrize("next_ticket", [0, 1, 5, 12])
def test_two_lanes_never_share_a_ticket_or_a_stream(next_ticket):
    config = load_config(["arithmetic"], ["--search.searchers=3"])
    plan = SearchPlan(config, "model", Stores(None, None), next_ticket)
    benches = [Bench(lane=lane) for lane in range(3)]
    found = []
    for lane, bench in enumerate(benches):
        bench.publish(0)
        turns = Lane(
            bench.searcher,
            "free",
            searches_per_round=1,
            first_ticket=plan.first_ticket(lane),
            stride=config.search.searchers,
        )
        found += [turns.turn(-1, -1)[0].ticket for _ in range(8)]
    assert sorted(found) == list(range(next_ticket, next_ticket + 24))
    numbers = [call.random_number for bench in benches for call in bench.engine.calls]
    assert len(set(numbers)) == 24


# --- S1: weights -----------------------------------------------------------------------------


def test_newer_weights_are_taken_and_samples_tagged_with_exactly_that_version(bench):
    tags, held = [], []
    for version in (0, 0, 4, 4, 9):
        bench.publish(version)
        tags.append({t.policy_version for t in bench.searcher.search(len(tags))})
        held.append(bench.engine.weights()["w"][0, 0].item())
    assert tags == [{0}, {0}, {4}, {4}, {9}]
    assert held == [0, 0, 4, 4, 9]


def test_the_reference_follows_its_own_wire(bench):
    before = bench.searcher.search(0)
    bench.reference_store.publish({"r": torch.full((2,), 7.0)}, 8)
    bench.reference_store.flush()
    after = bench.searcher.search(0)
    assert {t.reference_version for t in before} == {0}
    assert {t.reference_version for t in after} == {8}
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old.log_ref - 7, new.log_ref)


def test_damaged_weights_are_never_tagged(bench, monkeypatch):
    bench.searcher.search(0)
    bench.publish(6)
    bench.store._slots[int(bench.store._header[1]), 1] ^= 4
    monkeypatch.setattr("tba.sync.time.sleep", lambda seconds: None)
    with pytest.raises(WaitTimeoutError, match="did not match their hash"):
        bench.searcher.search(1)
    assert len(bench.engine.calls) == 1, "nothing is generated with them"
    bench.publish(7)
    assert {t.policy_version for t in bench.searcher.search(1)} == {7}


def test_without_a_reset_reference_only_the_policy_wire_is_read(bench):
    bench.searcher._stores = Stores(bench.store, None)
    assert {t.reference_version for t in bench.searcher.search(0)} == {0}


# --- S2 to S5 --------------------------------------------------------------------------------


def test_everything_found_lands_in_the_right_trajectory(bench):
    found = bench.searcher.search(4)
    queries = bench.tickets.take(4)
    assert [t.query_id for t in found] == [q.query_id for q in queries for _ in range(3)]
    for row, t in enumerate(found):
        query, sample = queries[row // 3], row % 3
        q = query.query_id
        tokens = [[30 + q, EOS], [50 + q, 13, EOS], [70 + q] * 4][sample]
        assert t.tokens.tolist() == tokens
        assert t.text == [f"{30 + q}", f"{50 + q} 13", " ".join([f"{70 + q}"] * 4)][sample]
        np.testing.assert_array_equal(t.prompt_ids, query.prompt_ids)
        np.testing.assert_array_equal(t.log_mu, np.full(len(tokens), -q - sample / 8))
        np.testing.assert_array_equal(t.log_ref, [-token - 100 * (10 + q) for token in tokens])
        assert t.finish_reason is (FinishReason.LENGTH if sample == 2 else FinishReason.STOP)
        assert (t.ticket, t.searcher, t.temperature) == (4, 5, 0.7)
        if sample == 1:
            assert t.score.outcome is Outcome.ERROR
            assert t.score.detail == f"cannot read {50 + q} 13"
            assert np.isnan(t.score.reward)
        else:
            assert t.score == Score(Outcome.OK, q + len(tokens) / 10)


def test_the_engine_is_given_the_tickets_queries_stream_and_sampling(bench):
    for ticket in (3, 0):
        bench.searcher.search(ticket)
    for ticket, call in zip((3, 0), bench.engine.calls, strict=True):
        assert call.query_ids == tuple(q.query_id for q in bench.tickets.take(ticket))
        assert call.sampling == SAMPLING
        stream = bench.tickets.generator(ticket)
        assert call.random_number == int(torch.randint(2**62, (), generator=stream))


def test_each_stage_is_announced_as_it_begins(bench):
    bench.searcher.search(0)
    assert bench.stages == [
        Stage.TAKING_WEIGHTS,
        Stage.GENERATING,
        Stage.SCORING,
        Stage.REFERENCE,
    ]


def _search_elsewhere(tickets, stores, pipe):
    """Pull through stores and tickets that came through a pickle."""
    into = make_weights(0)
    version = stores.policy.pull(into, newer_than=-1)
    numbers = torch.rand(3, generator=tickets.generator(2)).tolist()
    pipe.send((version, into["w"][0, 0].item(), [q.query_id for q in tickets.take(2)], numbers))


def test_what_is_sent_to_processes_is_picklable_and_means_the_same_there(bench):
    bench.publish(11)
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_search_elsewhere,
        args=(bench.tickets, Stores(bench.store, bench.reference_store), theirs),
    )
    child.start()
    assert ours.poll(240)
    version, weight, ids, numbers = ours.recv()
    child.join(60)
    assert (version, weight) == (11, 11.0)
    assert ids == [q.query_id for q in bench.tickets.take(2)]
    assert numbers == torch.rand(3, generator=bench.tickets.generator(2)).tolist()
    assert multiprocessing.active_children() == []


def test_trajectories_and_queries_survive_a_pickle(bench):
    (first, *_) = bench.searcher.search(0)
    again = pickle.loads(pickle.dumps(first))
    np.testing.assert_array_equal(again.tokens, first.tokens)
    assert again.score == first.score
    assert pickle.loads(pickle.dumps(bench.queries[1])).columns == {"answer": 1}
