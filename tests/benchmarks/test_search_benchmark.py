from argparse import Namespace

import pytest
import torch
from benchmarks.search import (
    SHAPES,
    TINY,
    EndsAtLengths,
    Shape,
    Spent,
    contestants,
    lines,
    make_work,
    take_turns,
)

from tba.config import ModelConfig
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.records import Query

RAGGED = Shape(2, 3, (3, 6), (1, 9), ("float32",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("tiny")
    build_policy(TINY, where, seed=0)
    return where


def test_the_tiny_model_has_a_million_parameters_and_64_tokens(folder):
    model = load_policy(
        folder, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32
    ).model
    assert model.config.vocab_size == 64
    assert model.num_parameters() == pytest.approx(1e6, rel=0.1)
    assert SHAPES["tiny"].prompt[1] + SHAPES["tiny"].response[1] <= TINY.max_position_embeddings


def test_rows_of_the_engine_end_at_their_lengths_and_are_else_the_same(folder):
    work = make_work(RAGGED, folder, "float32", 1, "cpu")
    model = load_policy(folder, ModelConfig(), device=work.device, dtype=work.dtype).model
    queries = [Query(at, "", ids, {}) for at, ids in enumerate(work.prompts)]

    def rows(engine):
        found = engine.generate(queries, Sampling(3, 1.0, 9), torch.Generator().manual_seed(0))
        return [response.tokens.tolist() for group in found for response in group]

    cut, full = rows(EndsAtLengths(model, work.lengths)), rows(TorchEngine(model, ()))
    assert [len(row) for row in cut] == work.lengths.flatten().tolist()
    assert len(set(work.lengths.flat)) > 2
    for one, other in zip(cut, full, strict=True):
        assert one == other[: len(one)]


@pytest.mark.parametrize("name", ["tba", "tba-int8", "generate", "continuous"])
def test_contestants_sample_the_lengths_asked_for(folder, name):
    work = make_work(RAGGED, folder, "float32", 1, "cpu")
    makers = contestants(Namespace(contestants=[name], vllm_python=None), RAGGED)
    found = take_turns(work, makers, repeats=1)  # refuses other lengths
    assert list(found) == [name]
    assert found[name].wall_s > 0


def test_lines_by_hand(folder):
    work = make_work(RAGGED, folder, "float32", 1, "cpu")
    work.lengths[:] = 10  # 60 tokens
    first, second = lines("x", work, {"tba": Spent(2.0, 1.0), "generate": Spent(3.0, 4.0)})
    assert first == "| x | float32 | 1 | tba | 30 | 1.00 | 60 | 1.00 |"
    assert second == "| x | float32 | 1 | generate | 20 | 1.50 | 15 | 4.00 |"
