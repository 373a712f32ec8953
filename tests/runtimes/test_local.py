"""The local runtime with real processes: who dies, who goes on, what is kept."""

import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest

import tba
from tba.config import Config
from tba.config.load import dump_toml
from tba.errors import SearcherFailedError, UserCodeError
from tba.pace import longest_search_s, longest_silence_s
from tba.run.checkpoint import load_newest
from tba.run.rollouts import RolloutLog
from tba.run.summary import Ending, Summary
from tba.runtimes.board import Board
from tba.runtimes.lanes import SearchPlan
from tba.runtimes.local import LaneProcess, LocalRuntime, _read
from tba.searcher import Stage, Stores
from tiny_runs import TASK, metrics, rollouts, tiny_config, train

pytestmark = pytest.mark.timeout(900)
PATIENCE_S = 300.0
LOCAL = {"kind": "local", "trainer_threads": 1, "searcher_threads": 1}


def local_config(folder: Path, task: str = TASK, **sections: dict[str, object]) -> Config:
    runtime = {**LOCAL, **sections.pop("runtime", {})}
    return tiny_config(folder, task, runtime=runtime, **sections)


def with_reward_timeout(config: Config, seconds: float) -> Config:
    task = config.task.model_copy(update={"reward_timeout_s": seconds})
    return config.model_copy(update={"task": task})


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def processes_of(parent: int) -> dict[int, str]:
    """Return the command line of every process below one, by process id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except (OSError, IndexError):
                continue  # it ended meanwhile
            if above == parent:
                found |= {int(entry.name): command, **processes_of(int(entry.name))}
    return found


def searchers(parent: int) -> list[int]:
    """Return the searchers' process ids; the resource tracker and scoring processes are none."""
    return sorted(pid for pid, command in processes_of(parent).items() if "spawn_main" in command)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_done(run: Path) -> int:
    return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0


# --- one run, one searcher of which is killed ------------------------------------------------


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """Run with two searchers; kill one after some steps, end when another has taken its place."""
    folder = tmp_path_factory.mktemp("survived")
    config = local_config(
        folder, search={"searchers": 2}, trainer={"steps": 1_000_000, "learning_rate": 1e-5}
    )
    run, story = folder / "run", {"threads": threading.active_count()}
    over = threading.Event()

    def interfere():
        try:
            wait_until(lambda: steps_done(run) > 20 and searched(run) == {0, 1})
            story["killed"] = searchers(os.getpid())[0]
            os.kill(story["killed"], signal.SIGKILL)
            story["steps_at_death"] = steps_done(run)
            wait_until(lambda: "takes its place" in (run / "logs/trainer.log").read_text())
            story["rows_at_death"] = len(rollouts_alive(run))
            wait_until(lambda: freshly_searched(run, story["rows_at_death"]) == {0, 1})
            story["steps_at_end"] = steps_done(run)
        finally:
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)  # ends the run after its present step

    helper = threading.Thread(target=interfere)
    helper.start()
    try:
        summary = train(folder, config)
    finally:
        over.set()
        helper.join()
    return run, summary, story


def rollouts_alive(run: Path) -> list[dict[str, object]]:
    """Read the log beside its writer: a copy, whose torn tail is dropped."""
    copy = run.parent / "copy.arrows"
    copy.write_bytes((run / "rollouts.arrows").read_bytes())
    with RolloutLog(copy) as log:
        return [row for batch in log.read() for row in batch.to_pylist()]


def searched(run: Path) -> set[object]:
    return {row["searcher"] for row in rollouts_alive(run)}


def freshly_searched(run: Path, since: int) -> set[object]:
    return {row["searcher"] for row in rollouts_alive(run)[since:]}


def test_the_trainer_goes_on_and_a_new_searcher_takes_the_place_of_a_killed_one(survived):
    run, summary, story = survived
    assert story["steps_at_end"] > story["steps_at_death"] + 5
    assert summary.searcher_restarts == 1
    log = (run / "logs" / "trainer.log").read_text()
    assert re.search(
        rf"searcher \d \(process {story['killed']}\) was killed by signal 9 while .*; "
        "a new one takes its place",
        log,
    )


def test_the_summary_agrees_with_the_log_and_the_metrics(survived):
    run, summary, _ = survived
    rows, lines = rollouts(run), metrics(run)
    counts = summary.trajectories
    assert counts.kept + counts.duplicate + counts.excluded == len(rows)
    assert counts.excluded == 0
    assert (summary.ended, summary.detail) == (Ending.INTERRUPTED, "stopped by SIGTERM")
    assert summary.steps == len(lines) == lines[-1]["step"]
    assert summary.tokens_searched == sum(len(row["tokens"]) for row in rows)
    assert summary.tokens_trained == sum(line["tokens_trained"] for line in lines)
    assert summary == Summary.read(run / "summary.json")
    assert load_newest(run / "checkpoints").state.step == summary.steps


def test_searchers_never_share_a_ticket_or_a_random_stream(survived):
    run, _, _ = survived
    by_ticket: dict[object, list[dict[str, object]]] = {}
    for row in rollouts(run):
        by_ticket.setdefault(row["ticket"], []).append(row)
    for ticket, rows in by_ticket.items():
        assert len(rows) == 16, "a ticket is delivered once and whole"
        assert {row["searcher"] for row in rows} == {ticket % 2}
    texts = [tuple(row["text"] for row in rows) for rows in by_ticket.values()]
    assert len(set(texts)) == len(texts)


def test_every_sample_carries_a_version_that_was_published(survived):
    run, summary, _ = survived
    versions = {row["policy_version"] for row in rollouts(run)}
    assert all(version % 2 == 0 and 0 <= version <= summary.steps for version in versions)
    assert len(versions) > 2


def test_the_trainer_hardly_waits_after_the_initial_fill(survived):
    _, summary, _ = survived
    print(f"trainer idle share: {summary.trainer_idle_share:.4f}")  # noqa: T201
    assert summary.trainer_idle_share <= 0.03


def test_nothing_is_left_behind(survived):
    _, _, story = survived
    assert searchers(os.getpid()) == []
    assert threading.active_count() == story["threads"]


# --- the trainer is killed, then interrupted -------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    command = "import sys; from tba.cli import main; sys.argv[0] = 'tba'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", command, "train", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_killed_trainer_takes_everybody_along_and_a_resumed_one_ends_at_ctrl_c(tmp_path):
    config = local_config(
        tmp_path,
        search={"searchers": 2},
        trainer={"steps": 1_000_000, "learning_rate": 1e-5},
        checkpoint={"every": 10},
        buffer={"capacity_per_query": 100_000},
    )
    toml, run = tmp_path / "run.toml", tmp_path / "run"
    toml.write_text(dump_toml(config))

    first = start(str(toml), "--run-dir", str(run))
    wait_until(lambda: steps_done(run) > 25 and any((run / "checkpoints").glob("step-*")))
    below = processes_of(first.pid)
    assert len(searchers(first.pid)) == 2
    assert len(below) >= 5, "two searchers and three scoring processes at least"
    first.kill()
    first.communicate()
    wait_until(lambda: not any(map(alive, below)), within_s=10)
    logged = rollouts_alive(run)
    at = load_newest(run / "checkpoints").state.step

    second = start("--resume", str(run))
    wait_until(lambda: steps_done(run) > at + 25)
    os.killpg(second.pid, signal.SIGINT)  # as the terminal sends it: to the whole group
    _, errors = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 130, errors
    assert "Traceback" not in errors
    summary = Summary.read(run / "summary.json")
    assert (summary.ended, summary.detail) == (Ending.INTERRUPTED, "stopped by SIGINT")
    assert load_newest(run / "checkpoints").state.step == summary.steps

    rows = rollouts(run)
    assert [repr(row) for row in rows[: len(logged)]] == [repr(row) for row in logged]
    tickets = [(row["ticket"], row["query_id"]) for row in rows[::4]]
    assert len(set(tickets)) == len(tickets), "no search batch is made twice"
    steps = [line["step"] for line in metrics(run)]
    assert steps == list(range(1, summary.steps + 1))
    unique = {(row["query_id"], tuple(row["tokens"])) for row in logged}
    first_after_resuming = metrics(run)[at]
    assert first_after_resuming["buffer_size"] >= len(unique), "none is missing from the buffer"
    counts = summary.trajectories
    assert counts.kept + counts.duplicate == len(rows)


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_ends_everything_and_nothing_stands_in_the_way(
    tmp_path,
) -> None:
    toml, run = tmp_path / "run.toml", tmp_path / "run"
    config = local_config(tmp_path)
    toml.write_text(dump_toml(config))
    for begun in (lambda _: (run / "config.json").exists(), searchers):
        early = start(str(toml), "--run-dir", str(run))
        wait_until(partial(begun, early.pid))
        os.killpg(early.pid, signal.SIGINT)
        _, errors = early.communicate(timeout=PATIENCE_S)
        assert early.returncode == 130, errors
        assert "Traceback" not in errors
        assert steps_done(run) == 0
    summary = tba.resume(run, progress=False)  # the second one had begun, the first had not
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 6)


# --- runs that cannot go on ------------------------------------------------------------------

BREACH = TASK.replace(
    "def reward(completions, **columns):",
    "def reward(completions, prompts, **columns):\n"
    "    if '9' not in prompts[0]:\n"
    "        return [1.0]",
)


def test_a_reward_that_breaks_its_contract_in_a_searcher_ends_the_run_with_its_sentence(tmp_path):
    with pytest.raises(UserCodeError, match="reward returned 1 rewards, expected 16"):
        train(tmp_path, local_config(tmp_path, BREACH))
    summary = Summary.read(tmp_path / "run" / "summary.json")
    assert summary.ended is Ending.FAILED
    assert "returned 1 rewards, expected 16" in summary.detail
    assert searchers(os.getpid()) == []


SLOW = TASK.replace("    return [sum", "    time.sleep(4)\n    return [sum")


@pytest.mark.slow
def test_a_reward_within_its_own_timeout_may_take_longer_than_a_silent_searcher_lives(tmp_path):
    config = local_config(
        tmp_path,
        "import time\n" + SLOW,
        sync={"timeout_s": 1.0, "stall_warning_s": 1.0},
        trainer={"steps": 1},
        evaluation={"queries": 1},
    )
    config = with_reward_timeout(config, 30.0)
    summary = train(tmp_path, config)
    assert (summary.ended, summary.searcher_restarts) == (Ending.FINISHED, 0)
    assert "scoring responses" in (tmp_path / "run/logs/trainer.log").read_text()


DEADLY = (
    "import multiprocessing, os\n"
    "if multiprocessing.current_process().name.startswith('searcher'):\n"
    "    os._exit(3)\n"
) + TASK


@pytest.mark.slow
def test_a_searcher_that_always_dies_ends_the_run_with_its_exit_code(tmp_path):
    with pytest.raises(
        SearcherFailedError,
        match=r"died 2 times in a row without a delivery \(the last one ended with exit code 3 ",
    ):
        train(tmp_path, local_config(tmp_path, DEADLY, runtime={"max_restarts": 1}))
    summary = Summary.read(tmp_path / "run" / "summary.json")
    assert (summary.ended, summary.searcher_restarts) == (Ending.FAILED, 1)


def test_a_searcher_that_stalls_in_the_middle_of_a_message_keeps_nobody_else_waiting() -> None:
    inbox: Queue[object] = Queue()
    stalled, stalled_end = multiprocessing.Pipe(duplex=False)
    healthy, healthy_end = multiprocessing.Pipe(duplex=False)
    for pipe in (stalled, healthy):
        threading.Thread(
            target=_read, args=(pipe, lambda *message: inbox.put(message)), daemon=True
        ).start()
    os.write(stalled_end.fileno(), struct.pack("!i", 1_000) + b"half")  # announces 1,000 bytes
    healthy_end.send("found")
    assert inbox.get(timeout=30) == (healthy, "found")
    assert inbox.empty()
    stalled_end.close()  # as when it is killed
    assert inbox.get(timeout=30) == (stalled, None)
    assert stalled.closed
    healthy_end.close()
    assert inbox.get(timeout=30) == (healthy, None)


def test_a_searcher_that_dies_as_it_starts_is_known_to_the_intake_thread() -> None:
    runtime = LocalRuntime.__new__(LocalRuntime)
    runtime._board = Board(1)
    runtime._board.stop()  # nobody is replaced
    runtime._lanes = []
    reading, writing = multiprocessing.Pipe(duplex=False)

    def messages():  # the main thread adds the lane while the intake thread waits for messages
        runtime._lanes.append(LaneProcess(0, process=None, pipe=reading, next_ticket=0))  # type: ignore[arg-type]
        yield reading, None

    runtime._messages = messages  # type: ignore[method-assign]
    runtime._take_in()
    assert runtime._lanes[0].ended_pipe
    writing.close()


def test_a_searcher_is_silent_from_the_moment_a_round_is_opened_that_it_does_not_take_up() -> None:
    runtime = LocalRuntime.__new__(LocalRuntime)
    runtime._board = Board(1)
    runtime._opened_at = time.monotonic() - 1_000.0
    runtime._board.announce(0, Stage.LOADING)
    runtime._board.announce(0, Stage.WAITING)
    lane = LaneProcess(0, process=None, pipe=None, next_ticket=0, ended=3)  # type: ignore[arg-type]
    runtime._board.opened = 3
    time.sleep(0.1)
    assert runtime._silent_s(lane) == 0.0, "it has delivered what was asked for"
    runtime.open_round(4)
    assert runtime._silent_s(lane) < 0.1, "it has waited longer, but not for this round"
    time.sleep(0.2)
    assert 0.2 <= runtime._silent_s(lane) < 10
    runtime._board.announce(0, Stage.GENERATING)
    assert runtime._silent_s(lane) < 0.2


def test_the_watchdog_leaves_a_searcher_alone_for_as_long_as_one_attempt_to_score_may_take(
    tmp_path,
) -> None:
    config = with_reward_timeout(
        local_config(tmp_path, sync={"timeout_s": 0.2, "stall_warning_s": 0.1}), 0.5
    )
    assert longest_silence_s(config) == 0.7
    responses = config.search.queries_per_batch * config.search.samples_per_query
    assert longest_search_s(config) == 0.2 + 0.5 * (1 + responses)
    plan = SearchPlan(config, "model", Stores(None, None), next_ticket=0)  # type: ignore[arg-type]
    runtime = LocalRuntime(plan, None, devices=["cpu"], threads=1, log_folder="")  # type: ignore[arg-type]
    killed: list[float] = []
    process = SimpleNamespace(pid=1, kill=lambda: killed.append(time.monotonic()))
    runtime._lanes = [LaneProcess(0, process, None, next_ticket=0)]  # type: ignore[arg-type]
    began = time.monotonic()
    runtime._board.announce(0, Stage.SCORING)
    while not killed and time.monotonic() < began + 30:
        runtime._watch()
        time.sleep(0.01)
    assert 0.7 <= killed[0] - began < 10


@pytest.mark.slow
def test_a_searcher_stopped_between_rounds_is_named_killed_and_replaced(tmp_path) -> None:
    config = local_config(
        tmp_path,
        trainer={"steps": 400},
        sync={"mode": "lockstep", "sync_every": 1, "timeout_s": 40.0, "stall_warning_s": 5.0},
    )
    toml, run = tmp_path / "run.toml", tmp_path / "run"
    toml.write_text(dump_toml(config))
    process = start(str(toml), "--run-dir", str(run))
    wait_until(lambda: steps_done(run) > 10)
    (searcher,) = searchers(process.pid)
    os.kill(searcher, signal.SIGSTOP)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    text = (run / "logs/trainer.log").read_text()
    assert "no sign of life: searcher 0" in text
    assert text.count("killing it") == 1
    assert "a new one takes its place" in text
    assert steps_done(run) == 400
