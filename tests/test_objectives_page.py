"""`docs/objectives.md` lists every objective and input, and its example trains."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tba.cli import app
from tba.config.model import BuildConfig
from tba.objectives import INPUTS, OBJECTIVES
from tba.policy.build import build_policy
from tba.run.summary import Ending
from test_docs import definitions
from tiny_runs import metrics, tiny_config, train

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \|.*?`(\w+\.py):(\w+)`", PAGE, flags=re.MULTILINE)


def test_every_kind_has_one_row_with_its_file():
    assert sorted(kind for kind, _, _ in ROWS) == sorted(OBJECTIVES)


@pytest.mark.parametrize(("kind", "file", "function"), ROWS)
def test_each_row_names_the_function_of_its_kind(kind, file, function):
    assert function in definitions(ROOT / "src/tba/objectives" / file)
    assert OBJECTIVES[kind].loss.__name__ == function


def test_every_input_is_listed_with_its_meaning():
    table = PAGE[PAGE.index("| input |") : PAGE.index("\n\n", PAGE.index("| input |"))]
    listed = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", table, flags=re.MULTILINE)
    assert {name: f"{meaning}; {shape}" for name, meaning, shape in listed} == INPUTS


def test_the_example_of_ten_lines_trains(tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    code = [line for line in source.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 10
    file = tmp_path / "mine.py"
    file.write_text(source)
    section = {"kind": "custom", "function": f"{file}:best_against_mean"}
    summary = train(tmp_path, tiny_config(tmp_path, objective=section))
    assert (summary.ended, summary.steps, summary.bad_steps) == (Ending.FINISHED, 6, 0)
    lines = metrics(tmp_path / "run")
    assert all(line["gain"] >= 0 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)


def block(language: str, word: str) -> str:
    """Return the one block of the page in a language that holds a word."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    (chosen,) = [text for text in found if word in text]
    return chosen


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_the_example_of_given_pairs_trains(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    build = BuildConfig(characters="abc=", hidden_size=16, intermediate_size=32)
    build_policy(build, tmp_path / "model", seed=0)
    Path("pairs.jsonl").write_text(block("json", "chosen"))
    Path("pairs.toml").write_text(block("toml", 'given = "pairs"'))
    arguments = block("sh", "pairs.toml").replace("DIR", "model").split()
    assert arguments[:2] == ["tba", "train"]
    small = [f"--runtime.kind={kind}", "--trainer.steps=3", "--run-dir=run"]
    result = CliRunner().invoke(app, [*arguments[1:], *small])
    assert result.exit_code == 0, result.output
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["before"]) == ("finished", 3, None)
    assert summary["detail"] in result.stdout
    assert summary["trajectories"]["kept"] == 10, "five of six pairs, one is held out"
    measured = CliRunner().invoke(app, ["eval", "run"])
    assert measured.exit_code == 2
    assert "the task has no reward function" in measured.stderr
    reward = '--task.reward=["exact_match"]'
    assert "needs a parameter 'answer'" in CliRunner().invoke(app, ["eval", "run", reward]).stderr
