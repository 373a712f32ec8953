import json
import math
from pathlib import Path

import numpy as np
import pytest

from tba.errors import StorageError
from tba.run.metrics import MetricsWriter, staleness_histogram


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"reward_mean": np.float32(0.5)}, staleness=np.array([0, 1, 1]))
        (line,) = lines(path)
        assert line["time"] > 1e9
        assert line == {
            "step": 1,
            "time": line["time"],
            "reward_mean": 0.5,
            "staleness_histogram": {"0": 1, "1": 2},
        }
        writer.write(2, {"reward_mean": 0.25})
        assert [line["step"] for line in lines(path)] == [1, 2]


def test_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300})
    (line,) = lines(path)
    assert [line[name] for name in "abcd"] == [None, None, None, 1e-300]


def test_a_resumed_run_forgets_later_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": 1 / step})
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:4]) + whole[4][:10])
    with MetricsWriter(path, resumed_step=3) as writer:
        assert path.read_text() == "".join(whole[:3])
        writer.write(4, {"loss": 0.1})
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[-1]["loss"] == 0.1
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_within_the_resumed_steps_goes_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    with MetricsWriter(path, resumed_step=9) as writer:
        writer.write(2, {})
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_a_run_without_metrics_can_be_resumed(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl", resumed_step=0) as writer:
        writer.write(1, {})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_refused_write_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"metrics file .* could not be written"):
        MetricsWriter(tmp_path)  # a folder


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named():
    with (
        MetricsWriter(Path("/dev/full")) as writer,
        pytest.raises(StorageError, match=r"disk is full.*: free some space, then try again"),
    ):
        writer.write(1, {})


def test_bins_are_powers_of_two():
    values = np.array([0, 1, 2, 3, 4, 7, 8, 15, 16])
    assert staleness_histogram(values) == {
        "0": 1,
        "1": 1,
        "2-3": 2,
        "4-7": 2,
        "8-15": 2,
        "16-31": 1,
    }
    assert staleness_histogram(np.array([5])) == {"0": 0, "1": 0, "2-3": 0, "4-7": 1}
    assert staleness_histogram(np.array([], dtype=np.int64)) == {}


def test_every_sample_is_in_the_bin_that_names_it():
    values = np.random.default_rng(0).integers(0, 1000, size=5000)
    histogram = staleness_histogram(values)
    assert sum(histogram.values()) == 5000
    for name, count in histogram.items():
        low, _, high = name.partition("-")
        assert count == np.sum((values >= int(low)) & (values <= int(high or low)))
