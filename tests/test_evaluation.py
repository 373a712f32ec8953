import itertools
import math

import numpy as np
import pytest

from tba.config import Config
from tba.engines import Sampling
from tba.engines.fake import FakeEngine
from tba.errors import AllExcludedError, ConfigError
from tba.evaluation import answers, evaluate, kl_to_reference, pass_at_k, perplexity
from tba.records import Outcome, Query, Score
from tba.tasks.base import RewardSpec, Task

EOS = 1
QUERIES = [
    Query(i, f"{i}", np.array([2], dtype=np.int32), columns={"answer": f"a{i}"}) for i in range(10)
]
RIGHT, WRONG, FAILING = 100, 200, 300  # first token of an answer to query q: one of these + q


class Tokens:
    """Decodes RIGHT + q to the right answer of query q; special tokens are left out on request."""

    def decode(self, token_ids, *, skip_special_tokens):
        kinds = {1: "a", 2: "b", 3: "fail "}
        words = [f"{kinds[t // 100]}{t % 100}" if t >= 100 else "<eos>" for t in token_ids]
        return "".join(w for w in words if not (skip_special_tokens and w == "<eos>"))


class ExactScorer:
    """Gives 1 for the query's own answer, 0 for another, and fails where it is told to."""

    def score(self, queries, texts, tokens):
        assert len(queries) == len(texts) == len(tokens)
        return [
            Score(Outcome.TIMEOUT, math.nan, f"no answer to {query.prompt}")
            if text.startswith("fail")
            else Score(Outcome.OK, float(text == query.columns["answer"]))
            for query, text in zip(queries, texts, strict=True)
        ]


def task(pass_threshold=1.0):
    return Task([], QUERIES, RewardSpec((), (), 1.0), pass_threshold, None, 0)


def run(engine, *, queries=10, queries_per_batch=4, seed=3, pass_threshold=1.0):
    return evaluate(
        engine,
        ExactScorer(),
        task=task(pass_threshold),
        tokenizer=Tokens(),
        config=Config.model_validate(
            {
                "seed": seed,
                "model": {"build": {}},
                "task": {"kind": "arithmetic"},
                "search": {"temperature": 0.7, "max_completion_length": 3},
                "evaluation": {"queries": queries, "queries_per_batch": queries_per_batch},
            }
        ),
        policy_version=42,
    )


def engine_that(kind_of, greedy=RIGHT):
    """An engine whose sampled answer to query q is of kind `kind_of(q)`."""
    return FakeEngine(
        lambda query, sample: [kind_of(query.query_id) + query.query_id, EOS],
        eos_token_id=EOS,
        greedy=lambda query, sample: [greedy + query.query_id, EOS],
    )


def test_shares_are_over_the_queries_asked():
    report = run(engine_that(lambda q: RIGHT if q % 2 else WRONG))
    assert (report.sampled_pass_at_1, report.greedy_pass_at_1) == (0.5, 1.0)
    assert (report.queries, report.excluded, report.policy_version) == (10, 0, 42)
    assert report.mean_response_tokens == 2.0  # end-of-sequence included
    assert report.seconds > 0


def test_failures_are_left_out_and_counted():
    # queries 0 to 3 fail, 4 to 6 are right, 7 to 9 wrong: 3 of 6
    report = run(engine_that(lambda q: FAILING if q < 4 else RIGHT if q < 7 else WRONG))
    assert report.sampled_pass_at_1 == 0.5
    assert report.greedy_pass_at_1 == 1.0
    assert report.excluded == 4


def test_nothing_scored_is_an_error_that_says_why():
    with pytest.raises(AllExcludedError, match=r"10 were excluded, .* no answer to 0"):
        run(engine_that(lambda q: FAILING))


def test_asking_is_given_up_once_the_first_responses_all_fail():
    engine = engine_that(lambda q: FAILING)
    with pytest.raises(AllExcludedError, match="none of the first 32 responses could be scored"):
        answers(
            engine,
            sampling=Sampling(samples_per_query=8, temperature=0.7, max_completion_length=3),
            scorer=ExactScorer(),
            queries=QUERIES,
            tokenizer=Tokens(),
            pass_threshold=1.0,
            queries_per_batch=2,
            seed=0,
        )
    assert [call.query_ids for call in engine.calls] == [(0, 1), (2, 3)]


def test_each_query_is_asked_once_sampled_and_once_greedily():
    engine = engine_that(lambda q: RIGHT)
    assert run(engine, queries=6, queries_per_batch=4).queries == 6
    assert [call.query_ids for call in engine.calls] == [(0, 1, 2, 3), (4, 5)] * 2
    assert [call.sampling.temperature for call in engine.calls] == [0.7, 0.7, 0.0, 0.0]
    assert {call.sampling.samples_per_query for call in engine.calls} == {1}
    assert {call.sampling.max_completion_length for call in engine.calls} == {3}


def test_fewer_held_out_queries_than_asked_for_are_all_asked():
    assert run(engine_that(lambda q: RIGHT), queries=1_000).queries == 10


def test_random_numbers_depend_on_the_seed_alone():
    def numbers(engine, seed):
        run(engine, seed=seed)
        return [call.random_number for call in engine.calls]

    before = numbers(engine_that(lambda q: WRONG), seed=3)
    assert numbers(engine_that(lambda q: RIGHT), seed=3) == before
    assert len(set(before[:3])) == 3  # each batch has its own
    assert set(before).isdisjoint(numbers(engine_that(lambda q: WRONG), seed=4))


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (0.5, 0.3), (1.5, 0.0)])
def test_a_response_is_right_from_the_threshold_on(threshold, share):
    engine = engine_that(lambda q: RIGHT if q < 3 else WRONG, greedy=RIGHT)
    assert run(engine, pass_threshold=threshold).sampled_pass_at_1 == pytest.approx(share)


def test_pass_at_k_averages_over_queries_with_enough_samples():
    # query q: samples j < q are right, sample 3 of query 2 fails
    def script(query, sample):
        q = query.query_id
        return [(FAILING if (q, sample) == (2, 3) else RIGHT if sample < q else WRONG) + q, EOS]

    given = answers(
        FakeEngine(script, eos_token_id=EOS),
        ExactScorer(),
        queries=QUERIES[:3],
        tokenizer=Tokens(),
        pass_threshold=1.0,
        sampling=Sampling(4, 1.0, 3),
        queries_per_batch=2,
        seed=0,
    )
    assert given.query_of.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert given.response_tokens == 24
    assert given.failures == ["no answer to 2"]
    assert given.mean_reward() == pytest.approx(3 / 11)
    # k = 1: mean of 0/4, 1/4, 2/3; k = 4: only the first two have four samples, mean of 0 and 1
    assert given.pass_at(1) == pytest.approx((0 + 1 / 4 + 2 / 3) / 3)
    assert given.pass_at(4) == 0.5


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        share = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_does_not_overflow():
    # 1 - C(9990, 5000) / C(10000, 5000) = 1 - about 2^-10
    exact = 1 - math.comb(9990, 5000) / math.comb(10000, 5000)
    assert pass_at_k(10_000, 10, 5_000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10_000, 10, 1) == pytest.approx(1e-3)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_what_makes_no_sense(n, c, k):
    with pytest.raises(ConfigError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


def test_perplexity_is_per_response_token():
    # two responses, 3 tokens at 1/2 and 1 at 1/8: (2^3 * 8)^(1/4) = 64^(1/4)
    log_probs = [np.log(np.full(3, 0.5, np.float32)), np.log(np.array([0.125], np.float32))]
    assert perplexity(log_probs) == pytest.approx(64**0.25, rel=1e-6)
    uniform = [np.full(n, -math.log(11), np.float32) for n in (1, 5, 2)]
    assert perplexity(uniform) == pytest.approx(11, rel=1e-6)


def test_kl_estimate_approaches_the_divergence():
    pi, ref = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    exact = 2 * float(np.sum(pi * np.log(pi / ref)))  # two independent tokens a response
    drawn = np.random.default_rng(0).choice(3, size=(40_000, 2), p=pi)
    log_pi = list(np.log(pi).astype(np.float32)[drawn])
    log_ref = list(np.log(ref).astype(np.float32)[drawn])
    error = float(np.std(np.sum(log_pi, 1) - np.sum(log_ref, 1))) / 200  # sqrt(40,000)
    assert kl_to_reference(log_pi, log_ref) == pytest.approx(exact, abs=4 * error)
    assert kl_to_reference(log_pi, log_pi) == 0
