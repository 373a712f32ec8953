"""Whatever the user gets wrong ends in one sentence and an exit code, and damages nothing."""

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from tba.cli import app
from tba.config.model import BuildConfig
from tba.policy.build import build_policy

SMALL = [
    "--model.model_name_or_path=model",
    "--runtime.kind=inline",
    "--task.max_prompt_length=8",
    "--search.queries_per_batch=2",
    "--search.samples_per_query=4",
    "--search.max_completion_length=4",
    "--buffer.initial_samples=8",
    "--trainer.steps=3",
    "--trainer.queries_per_batch=2",
    "--trainer.samples_per_query=4",
    "--checkpoint.every=1",
    "--sync.sync_every=1",
]
"""A run of a second."""

TASK = """
import time
from pathlib import Path

def train_rows():
    return [{{"prompt": 2 * letter, "part": "train"}} for letter in "abc"]

def test_rows():
    return [{{"prompt": "ab", "part": "test"}}]

def reward(completions, part, **columns):
    rewards = [float("a" in text) for text in completions]
    if part[0] == "train":
        {misdeed}
    return rewards
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    build_policy(BuildConfig(characters="abc", **sizes), folder, seed=0)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, model):
    """Stand in a folder with a model, a task of one's own and its configuration."""
    (tmp_path / "model").mkdir()
    for file in model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "task.toml").write_text('[task]\nkind = "custom"\nfile = "task.py"\n')
    (tmp_path / "data.toml").write_text(
        '[task]\nkind = "custom"\ntrain_file = "rows.jsonl"\nreward = ["exact_match"]\n'
    )
    monkeypatch.chdir(tmp_path)
    misbehave("pass")
    return tmp_path


def misbehave(misdeed: str) -> None:
    """Write the task whose reward does this when it is asked about training rows."""
    Path("task.py").write_text(TASK.format(misdeed=misdeed))


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments])


def trained(*arguments: str, run_dir: str = "run") -> tuple[dict, str]:
    """Train, successfully; return summary and what was told."""
    result = invoke(*arguments, "--run-dir", run_dir, *SMALL)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(Path(run_dir, "summary.json").read_text()), result.stderr


def sentence(result, code: int) -> str:
    """Return the one sentence with which a command ended."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    (told,) = [line for line in result.stderr.splitlines() if line.startswith("tba: ")]
    assert result.stderr.endswith(told + "\n")
    assert "Traceback" not in result.output
    return told.removeprefix("tba: ")


def refused(*arguments: str, code: int = 2) -> str:
    """Return the sentence with which a run is refused or ends; settings given here come last."""
    sources = [word for word in arguments if not word.startswith("--")]
    settings = [word for word in arguments if word.startswith("--")]
    return sentence(invoke(*sources, "--run-dir", "run", *SMALL, *settings), code)


def content(folder: str) -> dict[str, bytes]:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files if path.name != "tba.lock"}


# --- configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--trainer.stepz=3", "no setting trainer.stepz (did you mean trainer.steps?)"),
        ("--trainer.steps=many", 'trainer.steps is "many", expected integer > 0'),
        ("--trainer.steps=0", "trainer.steps is 0, expected integer > 0"),
        ("--sync.mode=fre", "did you mean free?"),
        ("--trainer.samples_per_query=5", "set S to 5 or more"),
        ("--trainer.micro_batch_tokens=20", "less than one query can need"),
        ("--device=gpu", "expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_wrong_setting_is_refused_and_nothing_is_written(place, setting, words):
    assert words in refused("task.toml", setting)
    assert content("run") == {}


# --- model -----------------------------------------------------------------------------------


def test_a_missing_model_folder_is_refused(place):
    told = refused("task.toml", "--model.model_name_or_path=./nowhere")
    assert told.startswith("The model folder ./nowhere does not exist")
    assert content("run") == {}


def test_a_tokenizer_without_end_of_sequence_is_refused(place):
    file = place / "model/tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    assert "no end-of-sequence token" in refused("task.toml")


def test_truncated_weights_are_refused(place):
    file = place / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "not readable safetensors" in refused("task.toml")


# --- data ------------------------------------------------------------------------------------

GOOD = '{"prompt": "ab", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "rows.jsonl does not exist"),
        ("", "rows.jsonl is empty"),
        (GOOD + GOOD + "{prompt}\n", "line 3 of"),
        (GOOD + '{"answer": "a"}\n', "has no column 'prompt'"),
        (GOOD.replace('"ab"', '"abababababab"') * 4, "longer than task.max_prompt_length = 8"),
        (GOOD.replace("answer", "solution") * 4, "needs a parameter 'answer'"),
    ],
)
def test_bad_data_is_refused_and_leaves_no_run(place, rows, words):
    if rows is not None:
        Path("rows.jsonl").write_text(rows)
    assert words in refused("data.toml")
    if "parameter" not in words:  # this one is seen when the first response is scored
        assert content("run") == {}


def test_prompts_too_long_are_counted_and_skipped(place):
    Path("rows.jsonl").write_text(GOOD * 8 + GOOD.replace('"ab"', '"abababababab"') * 2)
    summary, told = trained("data.toml")
    assert "skipped 2 prompts longer than task.max_prompt_length" in told
    assert summary["ended"] == "finished"


def test_a_column_that_cannot_be_sent_is_refused(place):
    file = Path("task.py")
    file.write_text(file.read_text().replace('"part": "train"', '"part": lambda: 0'))
    told = refused("task.toml")
    assert told.startswith("column 'part' of row 1 of train_rows()")
    assert "cannot be sent to the scoring process" in told


# --- given pairs -----------------------------------------------------------------------------

PAIR = '{"prompt": "ab", "chosen": "a", "rejected": "b"}\n'
PAIRS = """
[task]
kind = "custom"
train_file = "pairs.jsonl"
[buffer]
given = "pairs"
[search]
searchers = 0
[objective]
kind = "dpo"
"""


@pytest.fixture
def pairs(place):
    """Stand beside four good pairs and their configuration."""
    (place / "pairs.jsonl").write_text(PAIR * 4)
    (place / "pairs.toml").write_text(PAIRS)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            PAIR + PAIR.replace("chosen", "best"),
            "row 2 of {} has no column 'chosen'; it has",
        ),
        (
            PAIR + PAIR.replace('"b"', "3"),
            "rejected of row 2 of {} is 3, expected a text or",
        ),
        (PAIR + PAIR.replace('"a"', '[{"role": "user", "content": "a"}]'), "chosen of row 2 of {}"),
        (PAIR.replace('"a"', '"ax"') * 4, "the tokenizer cannot read an answer, 'ax'"),
        (PAIR.replace('"a"', '"aaaa"') * 4, "3 with an answer longer than search.max_completion_l"),
        (PAIR.replace('"a"', '"b"') * 4, "of 3 rows to train on: skipped given pairs: 3 with two"),
    ],
)
def test_bad_pairs_are_refused_and_leave_no_run(pairs, rows, words):
    Path("pairs.jsonl").write_text(rows)
    assert words.format(Path("pairs.jsonl").resolve()) in refused("pairs.toml")
    assert content("run") == {}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--objective.kind=grpo", "objective.kind = grpo asks for log_mu, which is not known"),
        ("--buffer.given=nothing", "so there would be nothing to learn from"),
        ("--sync.mode=lockstep", "set sync.mode to free"),
        ("--search.searchers=1", "task.reward names no reward function"),
    ],
)
def test_what_pairs_do_not_allow_is_refused(pairs, setting, words):
    assert words in refused("pairs.toml", setting)
    assert content("run") == {}


def test_pairs_used_up_end_the_run_at_once_with_what_to_raise(pairs):
    told = refused("pairs.toml", "--buffer.max_reuse=1")
    assert told.startswith("every given answer was used buffer.max_reuse = 1 times after 2 steps")
    assert json.loads(Path("run/summary.json").read_text())["ended"] == "failed"
    assert "after 2 steps" in sentence(invoke("--resume", "run"), 2)


def test_a_task_file_without_a_reward_is_refused_where_somebody_searches(place):
    file = Path("task.py")
    file.write_text(file.read_text().replace("def reward", "def judge"))
    assert "the task has no reward function" in refused("task.toml")
    assert content("run") == {}


# --- rewards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def reward(:", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def other(): pass", "no function 'reward'; it has other"),
        (None, "does not exist"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused(place, code, words):
    Path("rows.jsonl").write_text(GOOD * 4)
    if code is not None:
        Path("bad.py").write_text(code)
    assert words in refused("data.toml", '--task.reward=["bad.py:reward"]')
    assert content("run") == {}


BREACHES = [
    ("rewards.pop()", "returned 7 rewards, expected 8, one for each response"),
    ("rewards[0] = float('nan')", "returned nan, expected a finite number"),
    ("rewards[0] = 'good'", "returned 'good', expected a number or None"),
    ("return 1.0", "returned a float, expected a list of numbers"),
]


@pytest.mark.parametrize(("misdeed", "words"), BREACHES)
def test_a_reward_that_breaks_its_contract_ends_the_run(place, misdeed, words):
    misbehave(misdeed)
    assert words in refused("task.toml")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["ended"] == "failed"
    assert words in summary["detail"]


def test_a_reward_that_breaks_its_contract_in_a_searcher_process_ends_the_run(place):
    misbehave("rewards[0] = float('nan')")
    assert "expected a finite number" in refused("task.toml", "--runtime.kind=local")


def test_a_reward_that_raises_excludes_its_samples_and_the_run_goes_on(place):
    misbehave('assert "bb" not in columns["prompts"]')
    summary, _ = trained("task.toml")
    assert (summary["ended"], summary["steps"]) == ("finished", 3)
    excluded = summary["trajectories"]["excluded"]
    assert excluded > 0
    assert excluded % 4 == 0  # all S samples of a query, and of that query alone
    assert summary["trajectories"]["kept"] > 0


def test_a_reward_that_hangs_is_killed_and_its_sample_excluded(place):
    # Hangs in its first call, with the whole batch, and in the second, with one response.
    misbehave(
        'calls = Path("calls"); calls.open("a").write("x"); '
        "len(calls.read_text()) <= 2 and time.sleep(600)"
    )
    summary, _ = trained("task.toml", "--task.reward_timeout_s=5")
    assert (summary["ended"], summary["steps"]) == ("finished", 3)
    assert summary["trajectories"]["excluded"] == 1


def test_a_run_in_which_no_response_can_be_scored_says_why_it_ends(place):
    misbehave('raise OSError("no route to the judge")')
    told = refused("task.toml", code=1)
    assert "responses could not be scored, so there is nothing to learn from" in told
    assert "no route to the judge" in told
    assert json.loads(Path("run/summary.json").read_text())["ended"] == "failed"


# --- disk and run folder ---------------------------------------------------------------------


def test_a_disk_that_fills_up_ends_the_run_in_a_folder_that_can_be_resumed(place, monkeypatch):
    pwrite, written = os.pwrite, []

    def full(descriptor, data, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rollouts.arrows"):
            written.append(offset)
            if len(written) > 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert "No space left on device" in refused("task.toml", code=1)
    assert json.loads(Path("run/summary.json").read_text())["ended"] == "failed"
    assert invoke("--resume", "run").exit_code == 0
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 3


def test_a_disk_too_full_for_a_checkpoint_leaves_the_one_before(place, monkeypatch):
    from tba.run import checkpoint, manifest

    def full(folder):
        if folder.name.endswith("2"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        manifest.seal(folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "seal", full)
        assert "the disk is full" in refused("task.toml", code=1)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000001"]
    assert "disk is full" in json.loads(Path("run/summary.json").read_text())["detail"]
    assert invoke("--resume", "run").exit_code == 0
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 3


def test_a_folder_of_something_else_is_refused_and_not_touched(place):
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("words")
    assert "not a run folder, so nothing in it is touched" in refused("task.toml")
    assert "not a run folder" in refused("task.toml", "--clean")
    assert "is not a run folder" in sentence(invoke("--resume", "run"), 2)
    assert content("run") == {"run/thesis.txt": b"words"}


def test_a_used_folder_is_refused_and_survives_a_clean_that_fails(place):
    trained("task.toml")
    before = content("run")
    assert "already holds a run" in refused("task.toml")
    assert content("run") == before
    assert "does not exist" in refused("task.toml", "--clean", "--model.model_name_or_path=./gone")
    assert content("run") == before
    trained("task.toml", "--clean")
    assert not Path("run/tba.replaced").exists()


def test_a_damaged_checkpoint_is_passed_over_and_said(place):
    trained("task.toml")
    weights = Path("run/checkpoints/step-00000003/policy/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    result = invoke("--resume", "run")
    assert result.exit_code == 0, result.output
    assert "step-00000003 is damaged: policy/model.safetensors has" in result.stderr
    assert "resuming from run/checkpoints/step-00000002" in result.stderr
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 3


def test_a_run_without_a_whole_checkpoint_is_not_resumed(place):
    trained("task.toml")
    for manifest in Path("run/checkpoints").glob("*/MANIFEST.json"):
        manifest.unlink()
    before = content("run/checkpoints")
    assert "none of the 2 checkpoints" in sentence(invoke("--resume", "run"), 2)
    assert content("run/checkpoints") == before


# --- divergence ------------------------------------------------------------------------------

HUGE = "rewards = [3e38 * (at % 2) for at in range(len(rewards))]"
"""Finite in float32; its square is not."""


def test_a_step_without_a_finite_loss_is_skipped_and_counted(place):
    misbehave(HUGE)
    summary, _ = trained("task.toml")
    assert (summary["ended"], summary["bad_steps"]) == ("finished", 3)
    initial, final = (
        safetensors.numpy.load_file(folder / "model.safetensors")
        for folder in (Path("model"), Path("run/checkpoints/step-00000003/policy"))
    )
    assert all(np.array_equal(initial[name], final[name]) for name in initial)


def test_a_run_stops_after_so_many_bad_steps(place):
    misbehave(HUGE)
    told = refused("task.toml", "--trainer.max_bad_steps=2", code=1)
    assert told.startswith("2 steps in a row had no finite loss and gradient")
    assert json.loads(Path("run/summary.json").read_text())["bad_steps"] >= 1


def test_a_policy_that_overflows_ends_the_run_with_the_reason(place):
    more = ("--trainer.steps=20", "--trainer.learning_rate=1e30", "--trainer.max_bad_steps=2")
    assert "has diverged: lower trainer.learning_rate" in refused("task.toml", *more, code=1)


def test_a_disk_without_room_for_the_initial_model_is_named_and_the_folder_put_back(
    place, monkeypatch
):
    from tba.policy import initial

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(initial, "build_policy", full)
    sentence = refused("task.toml", "--model.model_name_or_path=none", "--model.build={}", code=1)
    assert "initial model run/model could not be written (the disk is full)" in sentence
    assert not Path("run/config.json").exists()


def test_a_full_disk_that_the_log_meets_first_does_not_hide_the_reason(place, capsys):
    from tba.run.logs import _LogFile

    class FullStream:
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        flush = close = lambda self: self.write("")

    log = _LogFile(place / "a.log")
    log.stream.close()
    log.stream = FullStream()
    log.handle(logging.makeLogRecord({"msg": "lost"}))
    log.close()
    assert capsys.readouterr().err == "", "no traceback of logging's own either"


def test_a_precision_that_the_device_lacks_is_refused_before_anything_is_loaded(place):
    told = refused("task.toml", "--search.precision=float8", "--device=cpu")
    assert told.startswith("search.precision is float8, but the searcher's device cpu has no 8-bit")
    assert not Path("run", "rollouts.arrows").exists()
