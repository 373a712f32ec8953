"""The passes that the training benchmark compares compute the same loss of the same batch."""

import dataclasses
import sys

import pytest
import torch
from benchmarks.training import MAKERS, SHAPES, Shape, make_work

from benchmarks import training
from tba.config.load import load_config
from tba.policy.build import build_policy


@pytest.fixture
def folder(tmp_path):
    build_policy(load_config(["arithmetic"]).model.build, tmp_path, seed=0)
    return tmp_path


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_naive_pass_computes_the_loss_of_the_packed_one(folder, precision):
    work = make_work(Shape(3, 4, (3, 8), (1, 6), tiny=True), folder, precision, "cpu")
    losses = []
    for name in ("packed", "naive"):
        each = MAKERS[name](work)
        assert each.seconds() > 0  # switches to its attention
        losses.append(each.loss().item())
        assert all(parameter.grad is not None for parameter in work.model.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if precision == "float32" else 1e-2)


def test_the_floor_runs_as_many_tokens_as_the_packed_pass(folder):
    work = make_work(dataclasses.replace(SHAPES["arithmetic"], queries=4), folder, "float32", "cpu")
    seen = []
    work.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    training.floor(work)
    assert len(seen) > 4
    assert all(abs(count - work.packed_tokens) < 0.1 * work.packed_tokens for count in seen)


def test_the_table_has_a_line_for_each_shape_and_precision(monkeypatch, capsys):
    monkeypatch.setitem(training.SHAPES, "arithmetic", Shape(2, 2, (3, 4), (1, 4), tiny=True))
    monkeypatch.setattr(training, "METHODS", ("packed", "naive", "floor"))
    for name in ("trl",):
        monkeypatch.delitem(training.MAKERS, name)
    monkeypatch.setattr(sys, "argv", ["training", "--repeats", "1", "--no-memory"])
    threads = torch.get_num_threads()
    training.main()
    torch.set_num_threads(threads)
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("| shape | precision | packed tokens/s |")
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| arithmetic", "bfloat16"],
        ["| arithmetic", "float32"],
    ]
