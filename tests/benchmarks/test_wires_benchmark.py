"""The benchmark of the wires: its weights are SmolLM2's, and its trainer meets its searchers."""

import argparse

import pytest
import torch
from benchmarks.deliveries import Shape
from benchmarks.wires import intake_lines, playing, smollm2_like, step_lines, weight_lines


def test_weights_are_as_many_as_those_of_the_model():
    weights = smollm2_like(0.01)
    assert len(weights) == 272
    assert sum(1 for name in weights if name.endswith(".gate")) == 30


def test_the_weights_wire_is_told_for_both_precisions():
    lines = list(weight_lines(smollm2_like(0.02), repeats=2))
    assert {line.count("|") for line in lines} == {4}
    assert len(lines) == 6


@pytest.mark.slow
def test_prepared_trajectories_reach_a_trainer_that_steps():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        arguments = argparse.Namespace(rate=2_000, blocks=1, steps=3)
        shape = Shape(queries=8)
        with playing(smollm2_like(0.02), shape, arguments.rate) as stage:
            intake = list(intake_lines(stage, shape, seconds=0.5))
            steps = list(step_lines(stage, arguments))
    finally:
        torch.set_num_threads(threads)
    assert len(intake) == 4
    quiet, delivering = (line.split("|")[2].strip() for line in (steps[2], steps[3]))
    assert quiet == "0"
    assert int(delivering.replace(",", "")) > 0
