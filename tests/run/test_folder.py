import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tba.config import ArithmeticTaskConfig, BuildConfig, Config, LocalRuntimeConfig, ModelConfig
from tba.errors import RunFolderError
from tba.run.folder import RunFolder
from tba.run.rollouts import _HEADER
from tba.run.summary import Ending, Totals, summarize


@pytest.fixture
def config():
    return Config(
        model=ModelConfig(build=BuildConfig(characters="0123456789+=é")),
        task=ArithmeticTaskConfig(left=(0, 99), right=(3, 9), train_queries=100, test_queries=10),
        runtime=LocalRuntimeConfig(max_restarts=1),
    )


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def fill(folder: RunFolder) -> None:
    """Leave what a run leaves."""
    folder.metrics.write_text("{}\n")
    folder.summary.write_text("{}")
    folder.rollouts.write_bytes(b"rollouts")
    folder.log("searcher-0").write_text("log")
    for directory in (folder.model, folder.checkpoints / "step-00000001"):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights")


def test_a_new_folder_gives_its_configuration_back(tmp_path, config):
    with RunFolder.create(tmp_path / "runs" / "a", config) as folder:
        assert folder.config() == config
        assert folder.checkpoints.is_dir()
        assert folder.log("searcher-0").parent.is_dir()
    with RunFolder.resume(folder.path) as resumed:
        assert pickle.loads(pickle.dumps(resumed)) == folder  # searchers get one
        assert resumed.config() == config


def test_a_folder_without_a_run_yet_may_be_used(tmp_path, config):
    (tmp_path / "tba.lock").touch()  # a run killed before it had written anything
    with RunFolder.create(tmp_path, config) as folder:
        assert folder.config() == config


def test_a_used_folder_is_refused_and_left_as_it_was(tmp_path, config):
    with RunFolder.create(tmp_path, config) as folder:
        fill(folder)
    assert_refused_and_left_as_it_was(tmp_path, config)


def assert_refused_and_left_as_it_was(path: Path, config: Config) -> None:
    before = contents(path)
    with (
        pytest.raises(RunFolderError, match="already holds a run"),
        RunFolder.create(path, config),
    ):
        pass
    assert contents(path) == before


def failed_before_its_first_step(folder: RunFolder) -> None:
    summarize(
        Totals(), steps=0, before=None, after=None, ended=Ending.FAILED, detail="no judge"
    ).write(folder.summary)
    folder.metrics.write_text('{"step": 0, "eval_reward": 1.0}\n')
    folder.rollouts.write_bytes(b"rollouts")
    folder.log("searcher-0").write_text("log")


def test_a_run_that_failed_before_its_first_step_stands_in_nobodys_way(tmp_path, config):
    with RunFolder.create(tmp_path, config) as folder:
        failed_before_its_first_step(folder)
    changed = config.model_copy(update={"seed": 7})
    with RunFolder.create(tmp_path, changed) as folder:
        assert folder.config().seed == 7
        assert not folder.rollouts.exists()


@pytest.mark.parametrize("trace", ["checkpoint", "metrics", "interrupted", "rollouts"])
def test_a_failed_run_that_was_resumed_and_went_on_is_not_taken_for_nothing(
    tmp_path, config, trace
):
    with RunFolder.create(tmp_path, config) as folder:
        failed_before_its_first_step(folder)
    if trace == "checkpoint":
        (folder.checkpoints / "step-00000002").mkdir()
    elif trace == "metrics":  # killed before its first checkpoint
        folder.metrics.write_text('{"step": 0}\n{"step": 1, "loss": 0.5}\n{"st')
    elif trace == "rollouts":  # failed in its first evaluation, with given attacks scored
        folder.rollouts.write_bytes(_HEADER + b"a row")
    else:
        folder.summary.write_text(folder.summary.read_text().replace("failed", "interrupted"))
    assert_refused_and_left_as_it_was(tmp_path, config)


def test_clean_deletes_what_a_run_made_and_nothing_else(tmp_path, config):
    with RunFolder.create(tmp_path, config) as folder:
        fill(folder)
    (tmp_path / "notes.txt").write_text("mine")
    (folder.checkpoints / "mine.txt").write_text("mine too")
    changed = config.model_copy(update={"seed": 7})
    with RunFolder.create(tmp_path, changed, clean=True) as folder:
        assert folder.config().seed == 7
    assert set(contents(tmp_path)) == {
        "config.json",
        "tba.lock",
        "notes.txt",
        "checkpoints/mine.txt",
    }


def fail(path: Path, config: Config, *, begun: bool) -> None:
    with RunFolder.create(path, config, clean=True) as folder:
        if begun:
            folder.begun()
        folder.metrics.write_text("new")
        raise ZeroDivisionError


def test_a_new_run_that_fails_before_it_began_leaves_the_older_one(tmp_path, config):
    with RunFolder.create(tmp_path, config) as folder:
        fill(folder)
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, config, begun=False)
    assert contents(tmp_path) == before


def test_a_run_that_fails_before_it_began_leaves_no_folder_that_was_not_there(tmp_path, config):
    for was_there in (False, True):
        path = tmp_path / str(was_there)
        if was_there:
            path.mkdir()
        with pytest.raises(KeyboardInterrupt), RunFolder.create(path, config):
            raise KeyboardInterrupt
        assert path.exists() == was_there


def test_a_new_run_that_fails_after_it_began_stays(tmp_path, config):
    with RunFolder.create(tmp_path, config) as folder:
        fill(folder)
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, config, begun=True)
    assert folder.metrics.read_text() == "new"
    assert not folder.rollouts.exists()


def test_clean_removes_a_link_and_not_what_it_points_to(tmp_path, config):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(b"weights")
    with RunFolder.create(tmp_path / "run", config) as folder:
        folder.model.symlink_to(elsewhere)
    with RunFolder.create(tmp_path / "run", config, clean=True) as folder:
        assert not folder.model.exists()
    assert contents(elsewhere) == {"model.safetensors": b"weights"}


@pytest.mark.parametrize("clean", [False, True])
def test_a_folder_of_somebody_else_is_never_touched(tmp_path, config, clean):
    (tmp_path / "config.json").write_text("{}")  # a model folder has one too
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    before = contents(tmp_path)
    with (
        pytest.raises(RunFolderError, match="not a run folder"),
        RunFolder.create(tmp_path, config, clean=clean),
    ):
        pass
    with pytest.raises(RunFolderError, match="not a run folder"), RunFolder.resume(tmp_path):
        pass
    assert contents(tmp_path) == before


def test_a_file_and_a_missing_folder_are_refused(tmp_path, config):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunFolderError, match="is a file"), RunFolder.create(file, config):
        pass
    with pytest.raises(RunFolderError, match="does not exist"), RunFolder.resume(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()


def test_a_spoilt_configuration_is_named_in_one_sentence(tmp_path, config):
    with RunFolder.create(tmp_path, config) as folder:
        pass
    folder.config_file.write_text(folder.config_file.read_text().replace('"seed": 0', '"seed": -1'))
    with pytest.raises(
        RunFolderError, match=r"config\.json cannot be used: seed: .*greater"
    ) as info:
        folder.config()
    assert "\n" not in str(info.value)


HOLD = """
import sys
from pathlib import Path
from tba.run.folder import RunFolder
with RunFolder.resume(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_live_run_is_in_use_and_a_killed_one_is_not(tmp_path, config):
    with RunFolder.create(tmp_path, config):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        before = contents(tmp_path)
        for attempt in (
            RunFolder.resume(tmp_path),
            RunFolder.create(tmp_path, config),
            RunFolder.create(tmp_path, config, clean=True),
        ):
            with pytest.raises(RunFolderError, match=f"in use .*process {holder.pid}"), attempt:
                pass
        assert contents(tmp_path) == before
        assert RunFolder.open(tmp_path).config() == config  # reading needs no lock
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with RunFolder.resume(tmp_path) as folder:
        assert folder.config() == config


def test_the_folder_needs_no_torch():
    blocked = "import sys; sys.modules['torch'] = None; import tba.run.folder, tba.run.summary"
    subprocess.run([sys.executable, "-c", blocked], check=True)
