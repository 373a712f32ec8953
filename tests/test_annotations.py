"""What searchers compute for an objective besides: each number against a direct computation."""

import math

import numpy as np
import pytest
import torch

from tba.annotations import (
    Annotations,
    Found,
    ReferenceLogZ,
    SearchTools,
    StepAdvantages,
    annotation_names,
    log_ref_stops,
    prefix_rewards,
)
from tba.config.load import load_config
from tba.config.objectives import AStarPOConfig, VinePPOConfig
from tba.engines.base import Sampling
from tba.engines.fake import FakeEngine
from tba.policy.reference import Reference
from tba.records import FinishReason, Outcome, Query, Response, Score
from tiny_models import EOS, VOCABULARY, tiny_model

GENERATOR = torch.Generator()
BAD = 7  # a token whose presence makes scoring fail
LONGEST = 6


class SumJudge:
    """The reward is the sum of the tokens, end-of-sequence left out; BAD cannot be scored."""

    def __init__(self):
        self.scored = []

    def texts(self, tokens):
        return ["\n" if 9 in row else "x" for row in tokens]

    def score(self, queries, tokens):
        self.scored += [tuple(row.tolist()) for row in tokens]
        scores = [
            Score(Outcome.ERROR, math.nan, "bad")
            if BAD in row
            else Score(Outcome.OK, float(sum(t for t in row.tolist() if t != EOS)))
            for row in tokens
        ]
        return ["" for _ in tokens], scores


def found(judge, query_id, tokens):
    query = Query(query_id, "q", np.array([2, 3 + query_id], dtype=np.int32))
    array = np.array(tokens, dtype=np.int32)
    response = Response(array, np.zeros(len(tokens), np.float32), FinishReason.STOP)
    return Found(query, response, judge.score([query], [array])[1][0])


def tools(judge, script, reference=None):
    engine = FakeEngine(script, eos_token_id=EOS)
    sampling = Sampling(samples_per_query=2, temperature=1.0, max_completion_length=LONGEST)
    return SearchTools(engine, engine, reference, judge, sampling, (EOS,))


def nothing(query, sample):
    raise AssertionError("nothing is to be sampled")


def test_prefix_rewards_are_those_of_the_response_ended_before_each_token():
    judge = SumJudge()
    rows = [found(judge, 0, [4, 5, EOS]), found(judge, 0, [4, 6]), found(judge, 1, [5, EOS])]
    judge.scored.clear()
    rewards = prefix_rewards(rows, tools(judge, nothing), GENERATOR)
    assert [r.tolist() for r in rewards] == [[0, 4, 9], [0, 4], [0, 5]]
    assert sorted(judge.scored) == sorted([(EOS,), (4, EOS), (4, 5, EOS), (EOS,), (5, EOS)]), (
        "equal prefixes of a query are scored once"
    )


def test_a_prefix_that_cannot_be_scored_excludes_the_response():
    judge = SumJudge()
    rows = [found(judge, 0, [4, EOS]), found(judge, 0, [BAD, 4, EOS])]
    own = tools(judge, nothing)
    scores, extras = Annotations({"prefix_reward": prefix_rewards}, own).of(rows, GENERATOR)
    assert [score.outcome for score in scores] == [Outcome.OK, Outcome.ERROR]
    assert extras[0]["prefix_reward"].tolist() == [0, 4]
    assert extras[1] == {}


def test_log_ref_stop_is_the_references_log_probability_of_ending_before_each_token():
    model = tiny_model("llama")
    judge = SumJudge()
    rows = [found(judge, 1, [4, 5, EOS]), found(judge, 0, [8, EOS])]
    own = tools(judge, nothing, Reference(model, temperature=0.7))
    stops = log_ref_stops(rows, own, GENERATOR)
    for row, stop in zip(rows, stops, strict=True):
        for at in range(len(row.response.tokens)):
            ids = np.concatenate([row.query.prompt_ids, row.response.tokens[:at]])
            logits = model(torch.from_numpy(ids).long()[None]).logits[0, -1] / 0.7
            assert stop[at] == pytest.approx(logits.log_softmax(-1)[EOS].item(), abs=1e-5)


def go_on(query, sample):
    """One more token, 8 for the first sample and as many as the prompt is long for the second."""
    return [8 if sample == 0 else len(query.prompt_ids), EOS]


def test_step_advantages_are_differences_of_monte_carlo_values():
    # Prompt of 2 tokens. V(s_0) = mean(8, 2) = 5; after token 4: V = 4 + mean(8, 3) = 9.5; after
    # 4, 5: V = 9 + mean(8, 4) = 15; the response itself: 9. Each token is a step.
    judge = SumJudge()
    section = VinePPOConfig(rollouts_per_prefix=2, step_separator="")
    (advantage,) = StepAdvantages(section)(
        [found(judge, 0, [4, 5, EOS])], tools(judge, go_on), GENERATOR
    )
    assert advantage.dtype == np.float32
    assert advantage.tolist() == [4.5, 5.5, -6.0]
    assert advantage.sum() == pytest.approx(9 - 5)  # they telescope


def test_a_step_ends_with_its_separator_and_its_tokens_share_the_advantage():
    # Steps [4, 9] and [5, EOS]: V(s_0) = 5 and V(after 4, 9) = 13 + mean(8, 4) = 19; reward 18.
    judge = SumJudge()
    section = VinePPOConfig(rollouts_per_prefix=2, step_separator="\n")
    (advantage,) = StepAdvantages(section)(
        [found(judge, 0, [4, 9, 5, EOS])], tools(judge, go_on), GENERATOR
    )
    assert advantage.tolist() == [14.0, 14.0, -1.0, -1.0]


def test_rollouts_from_a_prefix_end_where_the_response_would():
    judge = SumJudge()
    section = VinePPOConfig(rollouts_per_prefix=1, step_separator="")
    rows = [found(judge, 0, [4, 4, 4, 4, 4])]
    judge.scored.clear()
    StepAdvantages(section)(rows, tools(judge, lambda query, sample: [5] * 9), GENERATOR)
    assert max(map(len, judge.scored)) == LONGEST


def test_equal_prefixes_share_their_rollouts():
    judge = SumJudge()
    own = tools(judge, go_on)
    section = VinePPOConfig(rollouts_per_prefix=2, step_separator="")
    rows = [found(judge, 0, [4, 5, EOS]), found(judge, 0, [4, 6, EOS]), found(judge, 1, [4, EOS])]
    StepAdvantages(section)(rows, own, GENERATOR)
    (call,) = own.engine.calls
    assert len(call.query_ids) == 4 + 2  # "", 4, 4 5, 4 6 for query 0, "" and 4 for query 1


def test_log_z_star_is_log_mean_exp_over_samples_of_the_reference():
    judge = SumJudge()
    section = AStarPOConfig(beta={"kind": "constant", "value": 2.0}, reference_samples=2)
    rows = [found(judge, 1, [4, 5, EOS]), found(judge, 1, [EOS])]
    estimates = ReferenceLogZ(section)(rows, tools(judge, go_on), GENERATOR)
    expected = math.log((math.exp(8 / 2) + math.exp(2 / 2)) / 2)
    assert [len(e) for e in estimates] == [3, 1]
    np.testing.assert_allclose(np.concatenate(estimates), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tb", ()),
        ("subtb", ("prefix_reward", "log_ref_stop")),
        ("vineppo", ("step_advantage",)),
        ("a_star_po", ("log_z_star",)),
    ],
)
def test_each_objective_gets_what_it_names(kind, names):
    config = load_config(["arithmetic"], [f"--objective.kind={kind}"])
    assert annotation_names(config.objective) == names
    assert VOCABULARY > 9
