"""Scoring: rewards, failures and contract breaches of real functions in a real child."""

import dataclasses
import math
import os
import subprocess
import sys
import time
from multiprocessing import Pipe

import numpy as np
import pytest

from tba.errors import UserCodeError
from tba.records import Outcome, Query
from tba.tasks import RewardSpec, Scorer
from tba.tasks.scoring import MAX_LOST

HANGING_S = 1.5
"""Deadline where something hangs; elsewhere 30 s, so that a slow machine fails no test."""

FUNCTIONS = """
import asyncio, os, re, signal, subprocess, sys, threading, time
import numpy as np

def length(completions):
    return [len(c) for c in completions]

def columns_of(prompts, completions, completion_ids, gold, extra=None, **rest):
    assert "prompt" not in rest
    assert rest["label"] == [None] * len(prompts), rest
    assert prompts == ["p0", "p1"] and completions == ["a", "b"], (prompts, completions)
    assert completion_ids == [[0], [1]], completion_ids
    return gold

def messages(prompts, completions):
    assert prompts[0] == [{"role": "user", "content": "hi"}]
    return [float(c == [{"role": "assistant", "content": "a"}]) for c in completions]

async def slowly(completions):
    await asyncio.sleep(0.001)
    return [0.25] * len(completions)

def odd_ones(completions):
    return [None if len(c) % 2 == 0 else 1.0 for c in completions]

def scalars(completions):
    return [True, 2, np.float32(0.5), np.int64(3), np.bool_(False), None][: len(completions)]

def talkative(completions):
    print("to standard output", flush=True)
    print("to standard error", file=sys.stderr, flush=True)
    os.write(1, b"x" * 100_000)
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)

def fails_on(completions):
    for c in completions:
        if c == "raise":
            raise ValueError("cannot\\ngrade this")
        if c == "quit":
            sys.exit(5)
        if c == "exit":
            os._exit(3)
        if c == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if c == "close":
            os.closerange(3, 256)
        while c == "sleep":
            time.sleep(0.01)
        if c == "regex":
            re.match(r"(a+)+$", "a" * 50 + "b")
        if c == "fork":
            os.fork()
            time.sleep(60)
    return [1.0] * len(completions)

def wrong(completions, kind):
    return {
        "short": [1.0], "nan": [float("nan")] * 2, "inf": [float("-inf")] * 2,
        "string": ["1.0", "1.0"], "tuple": (1.0, 1.0), "none": None, "number": 1.0,
        "array": np.ones(2), "nested": [[1.0], [1.0]], "huge": [1e39, 1e39],
        "dict": [{"length": 1}] * 2, "told": [{"score": 1.0, "why": "because"}] * 2,
    }[kind[0]]

def emptied(completions):
    completions.clear()
    return []

def needy(completions, golden_answer):
    return [1.0] * len(completions)

def modules(completions):
    return [float(name in sys.modules) for name in ("torch", "transformers", "pyarrow")]

def counted(completions, path):
    with open(path[0], "a") as calls:
        calls.write("called\\n")
    time.sleep(600)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("mine", {"level": 3})
    right = float(solution_str == ground_truth)
    return {"score": right, "length": 1} if right else right

def tokens_if_any(completions, **columns):
    return [len(ids) for ids in columns.get("completion_ids", [])] or [-1] * len(completions)

def tokens_needed(completions, completion_ids):
    return [len(ids) for ids in completion_ids]

def pid(completions):
    return [os.getpid()] * len(completions)

def telling(completions):
    return [{"score": len(c), "halves": [len(c) / 2] * 2, "one": True} for c in completions]
"""


@pytest.fixture
def spec_of(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)

    def make(*names, weights=None, timeout_s=30.0):
        functions = tuple(name if ":" in name else f"{path}:{name}" for name in names)
        return RewardSpec(functions, weights or (1.0,) * len(names), timeout_s)

    return make


def query(prompt="p", **columns):
    return Query(0, "rendered", np.zeros(1, dtype=np.int32), {"prompt": prompt, **columns})


def score(scorer, texts, queries=None):
    queries = queries or [query() for _ in texts]
    tokens = [np.array([i], dtype=np.int32) for i in range(len(texts))]
    return scorer.score(queries, texts, tokens)


def outcomes(scores):
    return [s.outcome.value for s in scores]


def rewards(scores):
    return [s.reward for s in scores]


def test_rewards_come_back_in_order(spec_of):
    with Scorer(spec_of("length")) as scorer:
        scores = score(scorer, ["", "aaa", "aa"])
        assert score(scorer, []) == []
    assert outcomes(scores) == ["ok"] * 3
    assert rewards(scores) == [0.0, 3.0, 2.0]


def test_function_gets_what_it_asks_for(spec_of):
    queries = [query("p0", gold=0.5, extra="e", label=None), query("p1", gold=0.75)]
    with Scorer(spec_of("columns_of")) as scorer:
        scores = score(scorer, ["a", "b"], queries)
    assert rewards(scores) == [0.5, 0.75], scores


def test_only_sampled_texts_have_tokens(spec_of):
    with Scorer(spec_of("tokens_if_any")) as scorer:
        assert rewards(score(scorer, ["a", "b"])) == [1.0, 1.0]
        assert rewards(scorer.score([query(), query()], ["a", "b"], tokens=None)) == [-1.0, -1.0]
    with (
        Scorer(spec_of("tokens_needed")) as scorer,
        pytest.raises(UserCodeError, match="needs a parameter 'completion_ids', but there is"),
    ):
        scorer.score([query()], ["a"], tokens=None)


def test_message_prompts_get_message_completions(spec_of):
    chat = query([{"role": "user", "content": "hi"}])
    with Scorer(spec_of("messages")) as scorer:
        assert rewards(score(scorer, ["a", "b"], [chat, chat])) == [1.0, 0.0]


def test_weighted_sum_leaves_none_out(spec_of):
    spec = spec_of("length", "slowly", "odd_ones", weights=(2.0, 4.0, 0.5))
    with Scorer(spec) as scorer:
        scores = score(scorer, ["a", "aa"])
    # 2 * 1 + 4 * .25 + .5 * 1, and 2 * 2 + 4 * .25 without the third.
    assert rewards(scores) == [3.5, 5.0]


def test_none_from_every_function_is_not_applicable(spec_of):
    with Scorer(spec_of("odd_ones", "odd_ones")) as scorer:
        scores = score(scorer, ["a", "aa"])
    assert outcomes(scores) == ["ok", "not_applicable"]
    assert scores[0].reward == 2.0
    assert math.isnan(scores[1].reward)


def test_numbers_of_all_kinds_are_rewards(spec_of):
    with Scorer(spec_of("scalars")) as scorer:
        scores = score(scorer, ["x"] * 6)
    assert rewards(scores[:5]) == [1.0, 2.0, 0.5, 3.0, 0.0]
    assert scores[5].outcome is Outcome.NOT_APPLICABLE


def test_compute_score_of_verl_is_called_for_each_response(spec_of):
    chat = query([{"role": "user", "content": "hi"}], ground_truth="a")
    row = Query(
        0, "", chat.prompt_ids, {**chat.columns, "data_source": "mine", "extra_info": {"level": 3}}
    )
    with Scorer(spec_of("compute_score")) as scorer:
        scores = score(scorer, ["a", "b"], [row, row])
    assert rewards(scores) == [1.0, 0.0], scores


def test_numbers_that_a_function_tells_besides_the_score_come_along(spec_of):
    with Scorer(spec_of("telling", "length")) as scorer:
        short, long = score(scorer, ["a", "abc"])
    assert rewards([short, long]) == [2.0, 6.0]
    assert {name: values.tolist() for name, values in long.extras.items()} == {
        "halves": [1.5, 1.5],
        "one": [1.0],
    }


def test_printing_reward_breaks_nothing(spec_of, capfd):
    with Scorer(spec_of("talkative")) as scorer:
        assert rewards(score(scorer, ["a", "b"])) == [1.0, 1.0]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "to standard output" in captured.err


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        ("raise", "ValueError: cannot grade this"),
        ("quit", "SystemExit: 5"),
        ("exit", "the scoring process ended with exit code 3"),
        ("crash", "the scoring process ended with SIGSEGV"),
    ],
)
def test_only_the_culprit_is_an_error(spec_of, bad, detail):
    with Scorer(spec_of("fails_on")) as scorer:
        scores = score(scorer, ["a", bad, "b", bad])
        assert outcomes(scores) == ["ok", "error", "ok", "error"]
        assert [s.detail for s in scores] == ["", detail, "", detail]
        assert math.isnan(scores[1].reward)
        assert outcomes(score(scorer, ["a", "b"])) == ["ok", "ok"]


@pytest.mark.parametrize("bad", ["sleep", "regex", "fork"])
def test_only_the_culprit_times_out(spec_of, bad):
    with Scorer(spec_of("fails_on", timeout_s=HANGING_S)) as scorer:
        scores = score(scorer, ["a", bad, "b"])
    assert outcomes(scores) == ["ok", "timeout", "ok"]
    assert scores[1].detail == f"no reward within {HANGING_S} s"


def test_lone_response_is_not_tried_twice(spec_of, tmp_path):
    calls = tmp_path / "calls"
    with Scorer(spec_of("counted", timeout_s=HANGING_S)) as scorer:
        scores = score(scorer, ["a"], [query(path=str(calls))])
    assert outcomes(scores) == ["timeout"]
    assert calls.read_text() == "called\n"


def test_function_that_always_hangs_is_given_up(spec_of):
    n = MAX_LOST + 3
    with Scorer(spec_of("fails_on", timeout_s=0.2)) as scorer:
        scores = score(scorer, ["sleep"] * n)
    assert outcomes(scores) == ["timeout"] * n
    assert [s.detail.startswith("not tried") for s in scores] == [False] * MAX_LOST + [True] * 3


def test_function_that_always_ends_the_process_is_given_up(spec_of, monkeypatch):
    monkeypatch.setattr("tba.tasks.scoring.MAX_LOST", 2)
    starts = []
    with Scorer(spec_of("fails_on"), announce=lambda: starts.append(1)) as scorer:
        scores = score(scorer, ["exit"] * 5)
    assert outcomes(scores) == ["error"] * 5
    assert [s.detail.startswith("not tried") for s in scores] == [False] * 2 + [True] * 3
    assert scores[-1].detail == "not tried: 2 responses before it ended the scoring process"
    assert len(starts) == 1 + 2 * 2  # the batch as a whole, then each of two by a new child


def test_every_attempt_and_every_new_child_is_announced(spec_of):
    announced = []
    with Scorer(spec_of("fails_on"), announce=lambda: announced.append(1)) as scorer:
        assert announced == [], "starting belongs to loading"
        score(scorer, ["a", "b"])
        assert len(announced) == 1
        score(scorer, ["a", "exit"])  # together, a new child for "a", "exit" alone
    assert len(announced) == 1 + 4


def test_child_that_closes_its_pipe_is_replaced(spec_of):
    with Scorer(spec_of("fails_on")) as scorer:
        assert outcomes(score(scorer, ["a", "close"])) == ["ok", "error"]
        assert outcomes(score(scorer, ["a"])) == ["ok"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("short", "returned 1 rewards, expected 2, one for each response"),
        ("nan", "returned nan, expected a finite number"),
        ("inf", "returned -inf, expected a finite number"),
        ("huge", r"returned 1e\+39, expected a finite number"),
        ("string", "returned '1.0', expected a number or None"),
        ("nested", r"returned \[1.0\], expected a number or None"),
        ("tuple", "returned a tuple, expected a list"),
        ("none", "returned a NoneType, expected a list"),
        ("number", "returned a float, expected a list"),
        ("array", "returned a ndarray, expected a list"),
        ("dict", r"returned a dict without score \(length\), expected score in it"),
        ("told", "told .*because.* besides score, expected numbers or lists of them"),
    ],
)
def test_breach_of_contract_names_function_and_value(spec_of, kind, message):
    queries = [query(kind=kind), query(kind=kind)]
    with (
        Scorer(spec_of("wrong")) as scorer,
        pytest.raises(UserCodeError, match=rf"functions\.py:wrong {message}"),
    ):
        score(scorer, ["a", "b"], queries)


def test_a_breach_of_what_a_setting_names_is_that_settings(spec_of):
    spec = dataclasses.replace(spec_of("emptied"), setting="task.judge (m)")
    message = r"^task\.judge \(m\) returned 0 rewards, expected 2"
    with Scorer(spec) as scorer, pytest.raises(UserCodeError, match=message):
        score(scorer, ["a", "b"])


def test_a_function_that_changes_its_arguments_harms_nobody_but_itself(spec_of):
    message = "emptied returned 0 rewards, expected 2"
    with Scorer(spec_of("emptied")) as scorer, pytest.raises(UserCodeError, match=message):
        score(scorer, ["a", "b"], [query(), query()])


def test_missing_column_is_named(spec_of):
    message = "needy needs a parameter 'golden_answer', but there is answer, completion_ids"
    with Scorer(spec_of("needy")) as scorer, pytest.raises(UserCodeError, match=message):
        score(scorer, ["a"], [query(answer="4")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"cannot be used: .*functions\.py has no function 'missing'"),
        ("gone.py:f", "cannot be used: Python file gone.py does not exist"),
        ("nowhere_at_all:f", "cannot be used: .* ModuleNotFoundError"),
    ],
)
def test_function_that_cannot_be_imported_is_refused_on_entering(spec_of, name, message):
    with pytest.raises(UserCodeError, match=message), Scorer(spec_of("length", name)):
        pass


def test_file_that_ends_the_process_is_refused_on_entering(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os\nos._exit(7)\n")
    spec = RewardSpec((f"{path}:f",), (1.0,), 1.0)
    with (
        pytest.raises(UserCodeError, match=r"deadly\.py:f cannot be used: .* exit code 7"),
        Scorer(spec),
    ):
        pass


def test_scoring_process_loads_no_heavy_library(spec_of):
    with Scorer(spec_of("modules")) as scorer:
        assert rewards(score(scorer, ["a", "b", "c"])) == [0.0, 0.0, 0.0]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid):
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_child_whose_parent_was_gone_before_it_asked_ends():
    ours, theirs = Pipe()
    code = f"from tba.tasks.scoring_child import main; main({theirs.fileno()}, parent=2)"
    with ours, theirs:  # the pipe stays open, so that it is not what ends the child
        child = subprocess.run(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], timeout=60, check=False
        )
    assert child.returncode == 1


def test_child_ends_with_the_scorer(spec_of):
    with Scorer(spec_of("pid")) as scorer:
        pid = int(score(scorer, ["a"])[0].reward)
        assert is_alive(pid)
    assert not is_alive(pid)


ORPHAN = """
import sys
import numpy as np
from tba.records import Query
from tba.tasks import RewardSpec, Scorer

scorer = Scorer(RewardSpec((sys.argv[1],), (1.0,), float(sys.argv[3])))
scorer.__enter__()
print(scorer._child.pid, flush=True)
tokens = np.zeros(1, dtype=np.int32)
scorer.score([Query(0, "", tokens)], [sys.argv[2]], [tokens])
print("scored", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
@pytest.mark.parametrize(("text", "timeout_s"), [("idle", 600), ("sleep", 600), ("regex", 2)])
def test_child_ends_when_its_parent_is_killed(spec_of, text, timeout_s):
    """Also while a function sleeps, or holds the interpreter lock (until its time is up)."""
    reference = spec_of("fails_on").functions[0]
    command = [sys.executable, "-c", ORPHAN, reference, text, str(timeout_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        if text == "idle":
            assert parent.stdout.readline() == "scored\n"
        assert is_alive(pid)
        parent.kill()
    assert wait_until_dead(pid)


def test_unguarded_script_can_score(spec_of, tmp_path):
    """A user's script needs no `if __name__ == "__main__"` around its call."""
    script = tmp_path / "script.py"
    script.write_text(ORPHAN)
    command = [sys.executable, str(script), spec_of("fails_on").functions[0], "a", "30"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1:] == ["scored"]
