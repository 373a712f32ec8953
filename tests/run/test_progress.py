import io
import math

import numpy as np
import pytest
from rich.console import Console

from tba.records import EvalReport, StepReport
from tba.run.progress import CELLS, PLAIN_INTERVAL_S, Progress

METRICS = {
    "reward_mean": 0.5,
    "pass_at_1": 0.25,
    "kl": 0.0123,
    "loss": 1.5,
    "pair_accuracy": 0.75,
    "beta": 0.05,
    "learning_rate": 1e-4,
    "grad_norm": 2.0,
    "staleness_min": 1.0,
    "staleness_mean": 2.5,
    "staleness_max": 4.0,
    "search_tokens_per_s": 12345.6,
    "train_tokens_per_s": 999.9,
    "trainer_idle_share": 0.013,
    "searcher_idle_share": 0.5,
    "buffer_size": 12000.0,
    "excluded": 3.0,
}


class Screen:
    """A progress display on a console that can be read, and a clock that stands still."""

    def __init__(self, *, terminal: bool = False, steps: int = 100, width: int = 120) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None)
        self.progress = Progress(steps, console=console, clock=lambda: self.now)

    def step(self, step: int, at: float, **metrics: float) -> None:
        self.now = at
        staleness = np.zeros(1, dtype=np.int64)
        self.progress.update(StepReport(step, metrics, staleness, published=False))

    @property
    def text(self) -> str:
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def evaluation(**changes: float) -> EvalReport:
    values = {
        "policy_version": 40,
        "queries": 1000,
        "sampled_pass_at_1": 0.612,
        "greedy_pass_at_1": 0.7,
        "mean_response_tokens": 4.0,
        "excluded": 0,
        "seconds": 3.2,
    }
    return EvalReport(**(values | changes))


def test_a_plain_line_holds_every_metric():
    screen = Screen()
    screen.step(1, at=0.0, **METRICS)
    (line,) = screen.lines
    for cell in (
        "step 1/100",
        "reward 0.500",
        "pass@1 0.250",
        "KL 0.0123",
        "pair accuracy 0.750",
        "staleness 1/2.5/4",
        "search tokens/s 12,346",
        "train tokens/s 1,000",
        "trainer idle 1.3%",
        "searcher idle 50.0%",
        "buffer 12,000",
    ):
        assert cell in line


@pytest.mark.parametrize("missing", METRICS)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_missing_metric_only_leaves_out_its_cell(missing, terminal):
    screen = Screen(terminal=terminal)
    with screen.progress:
        screen.step(1, at=0.0, **{k: v for k, v in METRICS.items() if k != missing})
    (label,) = [label for label, template in CELLS.items() if f"{{{missing}:" in template]
    assert f"{label} " not in screen.text
    assert sum(f"{other} " in screen.text for other in CELLS) == len(CELLS) - 1


def test_nothing_is_said_of_search_where_nobody_searches():
    screen = Screen()
    screen.progress = Progress(100, searches=False, console=screen.progress._console)
    screen.step(1, at=0.0, **METRICS | {"pass_at_1": math.nan})
    assert screen.lines == [
        "step 1/100  reward 0.500  KL 0.0123  loss 1.5000  pair accuracy 0.750  beta 0.05  "
        "learning rate 0.0001  gradient norm 2.000  train tokens/s 1,000  trainer idle 1.3%  "
        "buffer 12,000"
    ]


def test_no_metric_at_all_and_nan_are_no_errors():
    screen = Screen()
    screen.step(1, at=0.0)
    screen.step(100, at=1.0, **dict.fromkeys(METRICS, math.nan))
    assert screen.lines[0] == "step 1/100"
    assert "reward nan" in screen.lines[1]


def test_plain_lines_come_once_an_interval_and_at_the_last_step():
    screen = Screen(steps=30)
    for step in range(1, 31):
        screen.step(step, at=float(step - 1))
    shown = [line.split()[1] for line in screen.lines]
    assert PLAIN_INTERVAL_S == 10
    assert shown == ["1/30", "11/30", "21/30", "30/30"]


def test_leaving_shows_the_last_step_once():
    screen = Screen()
    with screen.progress:
        screen.step(1, at=0.0)
        screen.step(2, at=0.1)
    assert [line.split()[1] for line in screen.lines] == ["1/100", "2/100"]


def test_time_left_follows_the_pace_since_the_first_step_seen():
    screen = Screen(steps=100)
    screen.step(51, at=100.0)  # a resumed run
    assert "left" not in screen.lines[0]
    screen.step(61, at=120.0)  # 10 steps in 20 s, so 39 steps in 78 s
    assert screen.lines[1].endswith("left 0:01:18")


def test_an_evaluation_is_told_at_once_and_stays_in_view():
    screen = Screen()
    screen.progress.evaluated(evaluation(excluded=3))
    screen.step(41, at=0.0)
    assert screen.lines[0] == (
        "evaluation at step 40: pass@1 0.612 sampled, 0.700 greedy, 1,000 queries, 3 excluded, 3 s"
    )
    assert "evaluation 0.612" in screen.lines[1]


def test_an_event_is_told_in_one_line_as_it_is():
    screen = Screen()
    screen.progress.event("searcher 1 died [bold] " + "x" * 300)
    assert screen.lines == ["searcher 1 died [bold] " + "x" * 300]


def test_no_cell_is_broken_in_a_terminal_of_80_columns():
    screen = Screen(terminal=True, width=80)
    with screen.progress:
        screen.step(1, at=0.0, **METRICS)
        screen.progress.evaluated(evaluation())
        screen.step(2, at=1.0, **METRICS)
    for cell in ("search tokens/s 12,346", "learning rate 0.0001", "evaluation 0.612"):
        assert cell in screen.text
    assert "[dim]" not in screen.text


def test_a_terminal_gets_one_picture_that_is_drawn_over():
    screen = Screen(terminal=True)
    with screen.progress:
        screen.step(1, at=0.0, **METRICS)
        screen.progress.event("a checkpoint was written")
        screen.step(2, at=0.01, **METRICS)  # too soon to draw
        screen.step(3, at=1.0, **METRICS)
    assert "step 1/100" in screen.text
    assert "step 2/100" not in screen.text
    assert "step 3/100" in screen.text
    assert "a checkpoint was written" in screen.text
    assert "\x1b[2K" in screen.text  # the panel's lines were erased before drawing again
