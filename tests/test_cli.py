import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import tba
from plan.profiles import made_profile
from tba.cli import app
from tba.config.load import load_config
from tba.errors import DivergedError, ModelError
from tba.run.folder import RunFolder
from tba.run.summary import Ending, Totals, summarize

runner = CliRunner()


@pytest.fixture
def calls(monkeypatch):
    """Put a recorder in the place of the run itself; its `error` is raised if one is set."""
    found = SimpleNamespace(made=[], error=None, ended=Ending.FINISHED)

    def run(config, run_dir, *, resume, clean, progress):
        found.made.append(
            SimpleNamespace(config=config, run_dir=run_dir, resume=resume, clean=clean)
        )
        if found.error is not None:
            raise found.error
        return summarize(
            Totals(),
            steps=3,
            before=None,
            after=None,
            ended=found.ended,
            detail="stopped by SIGINT",
        )

    monkeypatch.setitem(sys.modules, "tba.session", SimpleNamespace(run=run))
    monkeypatch.delattr(tba, "session", raising=False)
    return found


def refusal(*arguments: str) -> str:
    """Return the sentence with which a command line is refused."""
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("tba: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("tba: ").strip()


def test_train_passes_recipe_overrides_and_options_on_in_any_order(calls):
    result = runner.invoke(
        app,
        [
            "train",
            "--trainer.steps",
            "9",
            "arithmetic",
            "--run-dir",
            "r",
            "--task.pass_threshold",
            "-1",
            "--clean",
            "--sync.mode=barrier",
        ],
    )
    assert result.exit_code == 0, result.output
    (call,) = calls.made
    assert (call.config.trainer.steps, call.config.sync.mode) == (9, "barrier")
    assert call.config.task.pass_threshold == -1.0
    assert (call.run_dir, call.clean, call.resume) == (Path("r"), True, False)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_settings_alone_say_what_to_train(calls, command, tmp_path):
    settings = [
        *("--task.kind", "custom", "--task.train_file", str(tmp_path / "rows.jsonl")),
        *("--task.reward", '["exact_match"]', "--model.model_name_or_path", "m"),
        *("--search.max_completion_length", "8"),
    ]
    result = runner.invoke(app, [command, *settings, "--run-dir", "r"])
    assert result.exit_code == 0, result.output
    (call,) = calls.made
    assert (call.config.task.train_file, call.run_dir) == (tmp_path / "rows.jsonl", Path("r"))
    assert call.config.search.searchers == (1 if command == "train" else 0)


def test_dry_run_prints_a_configuration_that_loads_and_runs_nothing(calls, tmp_path):
    result = runner.invoke(app, ["train", "arithmetic", "--dry-run", "--seed", "7"])
    assert result.exit_code == 0
    file = tmp_path / "config.toml"
    file.write_text(result.stdout)
    assert load_config([str(file)]) == load_config(["arithmetic"], ["--seed=7"])
    assert calls.made == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "train arithmetic --trainer.stepz 3",
            "there is no setting trainer.stepz (did you mean trainer.steps?)",
        ),
        ("train arithmetic --trainer.steps", "--trainer.steps has no value"),
        ("train arithmetic --rundir x", "there is no option --rundir (did you mean --run-dir?)"),
        ("train arithmetic --dryrun", "there is no option --dryrun (did you mean --dry-run?)"),
        ("train arithmetik", "there is no recipe arithmetik (did you mean arithmetic?)"),
        ("train", "nothing to train is named: give a recipe (arithmetic"),
        ("train arithmetic --run-dir", "Option '--run-dir' requires an argument"),
        ("trian arithmetic", "No such command 'trian'"),
        ("train arithmetic --resume x", "--resume x goes on with that run as it was configured"),
        ("train --resume x --seed 3", "--resume x goes on with that run as it was configured"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(calls, arguments, sentence):
    assert refusal(*arguments.split()).startswith(sentence)
    assert calls.made == []


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ModelError("the folder x is missing"), 2, "tba: the folder x is missing\n"),
        (DivergedError("5 steps in a row\nhad no gradient"), 1, "tba: 5 steps in a row had no gra"),
        (KeyboardInterrupt(), 130, "tba: interrupted\n"),
    ],
)
def test_errors_of_a_run_end_in_a_sentence_and_their_exit_code(calls, error, code, told):
    calls.error = error
    result = runner.invoke(app, ["train", "arithmetic"])
    assert result.exit_code == code
    assert told in result.stderr
    assert "Traceback" not in result.output


def test_an_interrupted_run_ends_in_130_and_says_how_to_go_on(calls):
    calls.ended = Ending.INTERRUPTED
    result = runner.invoke(app, ["train", "arithmetic", "--run-dir", "r"])
    assert result.exit_code == 130
    assert result.stderr == (
        "tba: stopped by SIGINT after 3 steps; go on with: tba train --resume r\n"
    )


def test_resume_goes_on_as_the_run_was_configured(calls, tmp_path):
    with RunFolder.create(tmp_path, load_config(["arithmetic"])):
        pass
    assert runner.invoke(app, ["train", "--resume", str(tmp_path)]).exit_code == 0
    (call,) = calls.made
    assert call.config == load_config(["arithmetic"])
    assert (call.run_dir, call.resume) == (tmp_path, True)


def test_resuming_what_is_no_run_is_refused(calls, tmp_path):
    assert "is not a run folder" in refusal("train", "--resume", str(tmp_path))
    assert calls.made == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "eval m",
            "m is no run folder, nor anything else here: give that of a run, or say by --task",
        ),
        ("eval m n --task arithmetic", "eval takes one run folder or model, but was given 2"),
        ("eval m --task arithmetik", "there is no recipe arithmetik"),
        (
            "eval m --task arithmetic --k 1,16",
            "--k is 1,16, expected numbers from 1 to --samples (8)",
        ),
        ("eval m --task arithmetic --k some", "--k is some, expected numbers"),
        ("eval m --task arithmetic --samples 0", "Invalid value for '--samples'"),
        ("eval m --task arithmetic --seed x", 'seed is "x", expected integer >= 0'),
        ("eval ./m --task arithmetic", "The model folder ./m does not exist"),
    ],
)
def test_a_wrong_evaluation_is_one_sentence_and_exit_code_2(arguments, sentence):
    assert refusal(*arguments.split()).startswith(sentence)


PLAN_TAKES = "plan takes either a run, named as for train, or a --profile"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("plan", "plan takes either a run, named as for train, or a --profile, and neither"),
        (
            "plan arithmetic --profile p.json",
            "plan takes either a run, named as for train, or a --profile, and both",
        ),
        ("plan arithmetik", "there is no recipe arithmetik"),
        ("plan arithmetic --serchers 4", "there is no option --serchers (did you mean --searche"),
        ("plan arithmetic --searchers 0,2", "--searchers is 0,2, expected numbers from 1 to 4,096"),
        ("plan arithmetic --searchers a", "--searchers is a, expected numbers"),
        ("plan arithmetic --lengths 200", "--lengths is 200, expected a mean of at least 1"),
        ("plan arithmetic --lengths 1,1e300", "--lengths is 1,1e300, expected a mean"),
        ("plan arithmetic --search.precision float8", "search.precision is float8, but the sea"),
        ("plan arithmetic --lengths 200,x", "--lengths is 200,x, expected a mean"),
        ("plan arithmetic --ranks 0", "Invalid value for '--ranks'"),
        ("plan --profile no.json", "the profile no.json cannot be read: No such file"),
        (
            "plan arithmetic --runtime.kind inline",
            "runtime.kind is inline, where search and training take turns",
        ),
    ],
)
def test_a_wrong_plan_is_one_sentence_and_exit_code_2(arguments, sentence):
    assert refusal(*arguments.split()).startswith(sentence)


def test_a_plan_is_made_again_from_its_profile(tmp_path):
    made_profile().write(tmp_path / "profile.json")
    out = tmp_path / "again"
    given = ["--profile", str(tmp_path / "profile.json"), "--out", str(out)]
    result = runner.invoke(app, ["plan", *given, "--searchers", "2,8", "--sync.sync_every", "4"])
    assert result.exit_code == 0, result.output
    assert "steps/s" in result.stdout
    assert "searchers on: the trainer draws no more samples than" in result.stdout  # 4 or 5
    assert sorted(path.name for path in out.iterdir()) == ["plan.json", "plan.png", "profile.json"]


def test_a_bug_of_ours_keeps_its_traceback(calls):
    calls.error = ZeroDivisionError("a bug")
    assert isinstance(runner.invoke(app, ["train", "arithmetic"]).exception, ZeroDivisionError)


def test_help_shows_every_setting_with_meaning_default_and_unit():
    result = runner.invoke(app, ["train", "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    words = " ".join(result.stdout.split())
    assert "trainer.steps N: optimiser steps. (integer > 0; default 1000)" in words
    assert "A searcher silent for this long, in seconds, is killed and replaced;" in words
    assert "with task.kind = gsm8k: task.train_file" in words
    assert "--run-dir" in words


def test_version_is_printed():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("tba")


def test_doctor_ends_well_on_a_whole_installation():
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "extra dev" in result.stdout


def test_doctor_ends_in_1_when_the_core_lacks_something(monkeypatch):
    monkeypatch.setattr("tba.doctor.CORE", ("no-such-distribution",))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no-such-distribution" in result.stdout


def test_a_wrong_key_is_answered_without_importing_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "sys.argv = ['tba', 'train', 'arithmetic', '--trainer.stepz', '3']\n"
        "from tba.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "tba: there is no setting trainer.stepz (did you mean trainer.steps?)\n"
