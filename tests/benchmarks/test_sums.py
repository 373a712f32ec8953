"""The benchmarks' one-process world: samples are exactly as old as asked for."""

import numpy as np
import pytest
from benchmarks.sums import Job, mean_and_error, train

from tba.config.load import load_config
from tba.policy.build import build_policy
from tba.update import PolicyUpdate

SMALL = (
    "--trainer.queries_per_batch=3",
    "--search.queries_per_batch=3",
    "--trainer.samples_per_query=2",
    "--search.samples_per_query=2",
    "--evaluation.queries=4",
)


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """Train a job on random weights and return the policy versions of each step's samples."""
    model = tmp_path / "model"
    build_policy(load_config(["arithmetic"]).model.build, model, seed=0)
    step, seen = PolicyUpdate.step, []

    def watched(self, batch, number):
        seen.append(batch.policy_version[batch.index])
        return step(self, batch, number)

    monkeypatch.setattr(PolicyUpdate, "step", watched)

    def versions_of(**changes):
        job = {"overrides": SMALL, "steps": 5, "staleness": 2, "source": "constant", "seed": 0}
        report, bad_steps = train(Job(**{**job, **changes}, labels=()), str(model))
        assert bad_steps == 0
        assert report.queries == 4
        return seen

    return versions_of


def test_samples_are_exactly_as_stale_as_asked_for_once_there_are_such(versions):
    seen = versions()
    assert [v.shape for v in seen] == [(3, 2)] * 5
    assert [np.unique(v).tolist() for v in seen] == [[0], [0], [0], [1], [2]]


def test_the_buffer_mixes_the_newest_with_older_ones(versions):
    seen = versions(source="buffer", steps=8, overrides=(*SMALL, "--buffer.on_policy_prob=0.5"))
    newest = [max(0, step - 2) for step in range(8)]
    assert all(v.max() <= at for v, at in zip(seen, newest, strict=True))
    assert any(v.min() < at - 1 for v, at in zip(seen, newest, strict=True))


def test_jobs_are_told_apart_by_all_that_they_are():
    job = Job(SMALL, 5, 2, "constant", 0, ())
    others = [
        Job(SMALL, 6, 2, "constant", 0, ()),
        Job(SMALL, 5, 3, "constant", 0, ()),
        Job(SMALL, 5, 2, "buffer", 0, ()),
        Job(SMALL, 5, 2, "constant", 1, ()),
        Job((*SMALL, "--objective.kind=rloo"), 5, 2, "constant", 0, ()),
    ]
    assert len({job.key, *(other.key for other in others)}) == 6
    assert Job(SMALL, 5, 2, "constant", 0, ()).key == job.key


def test_mean_and_error_by_hand():
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert (mean, error) == (2.0, pytest.approx(1 / 3**0.5))
    assert np.isnan(mean_and_error([1.0])[1])
