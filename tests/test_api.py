import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tba
from tba import api
from tba.config.objectives import LinearBeta
from tba.run.folder import RunFolder


@pytest.fixture
def calls(monkeypatch):
    """Put a recorder in the place of the run itself."""
    found: list[SimpleNamespace] = []

    def run(config, run_dir, *, resume, clean, progress):
        progress.event("at work")
        found.append(SimpleNamespace(config=config, run_dir=run_dir, resume=resume, clean=clean))
        return "summary"

    monkeypatch.setitem(sys.modules, "tba.session", SimpleNamespace(run=run))
    monkeypatch.delattr(tba, "session", raising=False)
    return found


def test_a_recipe_with_settings_is_trained_in_the_folder(calls):
    beta = {"kind": "linear", "start": 0.1, "end": 0.05}
    settings = {"trainer.steps": 10, "objective.beta": beta, "task.answer_prefix": "12"}
    assert tba.train("arithmetic", run_dir="runs/x", **settings) == "summary"
    (call,) = calls
    assert call.config.trainer.steps == 10
    assert call.config.objective.beta == LinearBeta(start=0.1, end=0.05)
    assert call.config.task.answer_prefix == "12"
    assert (call.run_dir, call.resume, call.clean) == (Path("runs/x"), False, False)


@pytest.mark.parametrize(("start", "searchers"), [(tba.train, 1), (tba.sft, 0)])
def test_settings_alone_say_what_to_train(calls, start, searchers):
    start(
        **{
            "task.kind": "custom",
            "task.train_file": "rows.jsonl",
            "task.reward": ["exact_match"],
            "model.model_name_or_path": "m",
            "search.max_completion_length": 8,
        }
    )
    (call,) = calls
    assert call.config.search.searchers == searchers
    assert re.fullmatch(r"run-\d{8}-\d{6}", call.run_dir.name)


def test_a_configuration_is_trained_as_it_is(calls):
    config = tba.load_config(["arithmetic"], ["--runtime.kind=inline"])
    tba.train(config, clean=True)
    (call,) = calls
    assert call.config == config
    assert call.clean


def test_progress_goes_to_stderr_unless_it_is_not_wanted(calls, capsys):
    tba.train("arithmetic")
    assert capsys.readouterr() == ("", "at work\n")
    tba.train("arithmetic", progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_run_is_resumed_as_it_was_configured(calls, tmp_path):
    config = tba.load_config(["arithmetic"], ["--trainer.steps=3"])
    with RunFolder.create(tmp_path, config):
        pass
    tba.resume(tmp_path)
    (call,) = calls
    assert (call.config, call.run_dir, call.resume) == (config, tmp_path, True)


def test_none_unsets_a_setting(calls):
    tba.train("arithmetic", **{"model.build": None, "model.model_name_or_path": "m"})
    assert calls[0].config.model.build is None


def test_nothing_runs_when_the_configuration_is_wrong(calls):
    with pytest.raises(tba.UserError, match=r"trainer\.steps is \"10\""):
        tba.train("arithmetic", **{"trainer.steps": "10"})
    assert calls == []


@pytest.mark.parametrize(
    ("sources", "name"),
    [(["arithmetic"], "arithmetic"), (["a/b.toml", "arithmetic"], "b"), ([], "run")],
)
def test_default_folder_is_named_after_the_first_source_and_the_time(sources, name):
    assert re.fullmatch(rf"runs/{name}-\d{{8}}-\d{{6}}", str(api.default_run_dir(sources)))
