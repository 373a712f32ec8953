import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from tba.records import EvalReport
from tba.run.summary import (
    Ending,
    StalenessTotals,
    Summary,
    Totals,
    TrajectoryCounts,
    results_table,
    summarize,
)


def report(version=0, sampled=0.5, greedy=0.6):
    return EvalReport(
        policy_version=version,
        queries=1000,
        sampled_pass_at_1=sampled,
        greedy_pass_at_1=greedy,
        mean_response_tokens=4.25,
        excluded=3,
        seconds=1.5,
    )


def test_staleness_of_two_batches_is_that_of_both_together():
    generator = np.random.default_rng(0)
    a, b = generator.integers(2, 30, size=40), generator.integers(0, 9, size=7)
    both = np.concatenate([a, b])
    assert StalenessTotals.of(a) + StalenessTotals.of(b) == StalenessTotals(
        47, both.sum(), both.min(), both.max()
    )


def test_an_empty_batch_adds_nothing():
    batch = StalenessTotals.of(np.array([3, 5]))
    empty = StalenessTotals.of(np.array([], dtype=np.int64))
    assert batch + empty == empty + batch == batch == StalenessTotals(2, 8, 3, 5)


def test_totals_add_field_by_field():
    first = Totals(seconds=1.5, tokens_searched=10, kept=3, staleness=StalenessTotals(1, 2, 2, 2))
    second = Totals(seconds=2.0, tokens_searched=5, excluded=1)
    assert first + second == Totals(
        seconds=3.5, tokens_searched=15, kept=3, excluded=1, staleness=StalenessTotals(1, 2, 2, 2)
    )
    assert first + Totals() == first


def test_shares_and_means_are_computed_from_the_totals():
    totals = Totals(
        seconds=100.0,
        trainer_seconds=80.0,
        trainer_idle_seconds=2.0,  # 2 / 80 = .025
        searcher_seconds=200.0,
        searcher_idle_seconds=50.0,  # 50 / 200 = .25
        kept=5,
        duplicate=2,
        excluded=1,
        staleness=StalenessTotals(4, 10, 1, 6),  # mean 10 / 4 = 2.5
    )
    summary = summarize(totals, steps=9, before=report(), after=report(9), ended=Ending.FINISHED)
    assert summary.trainer_idle_share == 0.025
    assert summary.searcher_idle_share == 0.25
    assert (summary.staleness.min, summary.staleness.mean, summary.staleness.max) == (1, 2.5, 6)
    assert summary.trajectories == TrajectoryCounts(kept=5, duplicate=2, excluded=1)


def test_a_run_that_failed_at_once_has_a_summary():
    summary = summarize(
        Totals(), steps=0, before=None, after=None, ended=Ending.FAILED, detail="no disk"
    )
    assert summary.trainer_idle_share == 0
    assert summary.staleness is None
    assert summary.detail == "no disk"


def test_a_summary_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "summary.json"
    written = summarize(
        Totals(seconds=0.1 + 0.2, staleness=StalenessTotals(3, 7, 1, 4)),
        steps=3,
        before=report(sampled=1 / 3),
        after=None,
        ended=Ending.INTERRUPTED,
        detail="stopped by Ctrl-C",
    )
    written.write(path)
    assert Summary.read(path) == written
    plain = json.loads(path.read_text())
    assert plain["before"]["sampled_pass_at_1"] == 1 / 3
    assert plain["after"] is None
    assert plain["ended"] == "interrupted"
    assert plain["staleness"] == {"min": 1, "mean": 7 / 3, "max": 4}
    assert set(plain["trajectories"]) == {"kept", "duplicate", "excluded"}


@pytest.mark.parametrize(
    ("label", "numbers"),
    [("sampled pass@1", "49.3 % 93.1 % +43.8"), ("greedy pass@1", "61.0 % 60.0 % -1.0")],
)
def test_the_table_shows_both_sides_in_percent(label, numbers):
    output = io.StringIO()
    Console(file=output, width=100).print(
        results_table(report(0, sampled=0.493, greedy=0.61), report(400, sampled=0.931, greedy=0.6))
    )
    row = next(line for line in output.getvalue().splitlines() if label in line)
    assert " ".join(row.replace("│", " ").split()) == f"{label} {numbers}"


def test_a_measure_that_could_not_be_told_before_has_no_change():
    before, after = (
        dataclasses.replace(report(), measured=measured)
        for measured in ({"reward": 0.25}, {"reward": 0.5, "distinct_2": 0.75})
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(before, after))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["reward", "0.250", "0.500", "+0.250"] in rows
    assert ["distinct", "2", "0.750"] in rows
