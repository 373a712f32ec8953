"""The benchmark of the buffer: what it fills it with, and that it says what it measured."""

from benchmarks.buffer import RULES, draw_lines, fill, storage_lines, time_draws
from benchmarks.deliveries import Shape, deliveries

from tba.run.rollouts import decode


def test_deliveries_are_what_searchers_send():
    shape = Shape(queries=3, samples=2, prompt=4, response=5)
    first, second = deliveries(2, shape, all_queries=4)
    assert first["query_id"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert second["query_id"].to_pylist() == [3, 3, 0, 0, 1, 1]
    for trajectory in decode(second):
        assert (len(trajectory.prompt_ids), len(trajectory.tokens)) == (4, 5)
        assert len(trajectory.log_mu) == len(trajectory.log_ref) == 5
        assert trajectory.policy_version == 1


def test_a_size_is_measured_and_told_in_full(tmp_path):
    shape = Shape(response=8)
    measured = [fill(size, shape, tmp_path / "log") for size in (1_024, 4_096)]
    assert [one.size for one in measured] == [1_024, 4_096], "nothing was merged or evicted"
    assert not list(tmp_path.iterdir()), "logs of this size are not left behind"
    time_draws(measured, 2)
    assert all(len(one.draws_ms[rule]) == 2 for one in measured for rule in RULES)
    for table in (list(storage_lines(measured, shape)), list(draw_lines(measured))):
        assert len({line.count("|") for line in table}) == 1
