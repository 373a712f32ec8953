import numpy as np
import pytest
import torch

from tba.engines import Engine, Sampling
from tba.engines.fake import FakeEngine
from tba.records import FinishReason, Query

EOS = 1
QUERIES = [Query(i, str(i), np.array([i + 2], dtype=np.int32)) for i in range(3)]


def sampling(samples=2, temperature=1.0, length=4):
    return Sampling(samples, temperature, length)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_function_is_asked_for_each_query_and_sample():
    engine: Engine = FakeEngine(
        lambda query, sample: [10 * query.query_id + sample + 2, EOS], eos_token_id=EOS
    )
    answers = engine.generate(QUERIES, sampling(samples=2), generator())
    assert [[r.tokens[0] for r in of_query] for of_query in answers] == [[2, 3], [12, 13], [22, 23]]


def test_a_table_is_repeated_in_turn():
    engine = FakeEngine({7: [[5, EOS], [6, EOS]]}, eos_token_id=EOS)
    query = Query(7, "7", np.array([2], dtype=np.int32))
    (answers,) = engine.generate([query], sampling(5), generator())
    assert [r.tokens[0] for r in answers] == [5, 6, 5, 6, 5]


def test_answers_end_at_the_first_end_of_sequence_or_at_the_limit():
    table = {0: [[5, EOS, 6]], 1: [[5, 6, 7, 8, EOS]], 2: [[EOS]]}
    engine = FakeEngine(table, eos_token_id=EOS, log_mu=-0.5)
    stopped, cut, empty = (r for (r,) in engine.generate(QUERIES, sampling(1), generator()))
    assert stopped.tokens.tolist() == [5, EOS]
    assert stopped.finish_reason is FinishReason.STOP
    assert cut.tokens.tolist() == [5, 6, 7, 8]
    assert cut.finish_reason is FinishReason.LENGTH
    assert empty.tokens.tolist() == [EOS]
    assert cut.log_mu.tolist() == [-0.5] * 4
    assert (cut.tokens.dtype, cut.log_mu.dtype) == (np.int32, np.float32)


def test_log_probabilities_can_be_scripted():
    engine = FakeEngine(
        {0: [[5, EOS, 6], [7, EOS]]},
        eos_token_id=EOS,
        log_mu=lambda query, sample: [-0.25 * (sample + 1), -2.0, -9.0][: 3 - sample],
    )
    ((first, second),) = engine.generate(QUERIES[:1], sampling(2), generator())
    assert first.log_mu.tolist() == [-0.25, -2.0]
    assert second.log_mu.tolist() == [-0.5, -2.0]


def test_greedy_answers_may_differ():
    engine = FakeEngine(lambda q, j: [5, EOS], eos_token_id=EOS, greedy=lambda q, j: [6, EOS])
    ((sampled,),) = engine.generate(QUERIES[:1], sampling(1), generator())
    ((greedy,),) = engine.generate(QUERIES[:1], sampling(1, temperature=0.0), generator())
    assert (sampled.tokens[0], greedy.tokens[0]) == (5, 6)


@pytest.mark.parametrize(("one", "other", "same"), [(3, 3, True), (3, 4, False)])
def test_calls_tell_random_streams_apart(one, other, same):
    engine = FakeEngine(lambda q, j: [EOS], eos_token_id=EOS)
    for seed in (one, other):
        engine.generate(QUERIES, sampling(1), generator(seed))
    first, second = engine.calls
    assert first.query_ids == (0, 1, 2)
    assert first.sampling == sampling(1)
    assert (first.random_number == second.random_number) is same


def test_weights_are_live():
    weights = {"w": torch.zeros(2)}
    engine = FakeEngine(
        lambda q, j: [int(weights["w"][0]) + 2, EOS], eos_token_id=EOS, weights=weights
    )
    engine.weights()["w"].fill_(5.0)
    ((answer,),) = engine.generate(QUERIES[:1], sampling(1), generator())
    assert answer.tokens[0] == 7
