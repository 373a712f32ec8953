"""Recording passes, without a GPU: what of CUDA is called, and which GPU is current meanwhile."""

import contextlib
from types import SimpleNamespace

import torch

from tba.engines.recording import Recording


class _Graph:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


def test_a_pass_is_recorded_on_its_own_gpu(monkeypatch):
    current, recorded_on, made = ["cuda:0"], [], []

    @contextlib.contextmanager
    def on(device):
        current.append(str(device))
        yield
        current.pop()

    @contextlib.contextmanager
    def recorded(graph):
        made.append(graph)
        recorded_on.append(current[-1])
        yield

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(CUDAGraph=_Graph, graph=recorded, device=on))
    ran_on = []
    recording = Recording(torch.device("cuda:1"))
    for key in ("short", "short", "short", "long"):
        recording.run(lambda: ran_on.append(current[-1]), key)
    assert ran_on == ["cuda:0", "cuda:1", "cuda:1"]  # first without, then one for each key
    assert recorded_on == ["cuda:1", "cuda:1"]
    assert [graph.replays for graph in made] == [2, 1]
    assert current == ["cuda:0"]


def test_nothing_is_recorded_on_a_cpu():
    ran = []
    recording = Recording(torch.device("cpu"))
    for _ in range(3):
        recording.run(lambda: ran.append(None), "same")
    assert len(ran) == 3
