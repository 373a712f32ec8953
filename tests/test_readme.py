"""The README's examples, taken out of it and run with a tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tba.cli import app
from tba.config.load import recipes
from tba.config.model import BuildConfig
from tba.policy.build import build_policy

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SMALL = [
    "--runtime.kind=inline",
    "--trainer.steps=3",
    "--trainer.samples_per_query=4",
    "--search.samples_per_query=4",
    "--buffer.initial_samples=8",
    "--evaluation.queries=10",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def files() -> dict[str, str]:
    """Return the examples that say in their first line which file they are."""
    named = [block for kind in ("python", "toml") for block in blocks(kind)]
    return {block.splitlines()[0].removeprefix("# "): block for block in named}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Put the README's files into the working directory, beside a tiny model."""
    for name, text in files().items():
        (tmp_path / name).write_text(text.replace('"DIR"', '"model"'))
    (words,) = blocks("json")
    (tmp_path / "words.jsonl").write_text(words)
    build = BuildConfig(characters="abc=", hidden_size=16, intermediate_size=32)
    build_policy(build, tmp_path / "model", seed=0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["train", *arguments, "--run-dir", "run", *SMALL])
    assert result.exit_code == 0, result.output
    return json.loads(Path("run/summary.json").read_text())


def test_the_readme_is_short_and_so_is_its_example():
    assert len(README.splitlines()) <= 200
    code = [line for line in files()["reverse.py"].splitlines()[1:] if line.strip()]
    assert len(code) <= 15


def test_the_python_file_of_the_readme_is_a_task(workplace):
    (command,) = [block for block in blocks("sh") if "reverse.toml" in block]
    arguments = command.replace("DIR", "model").split()
    assert arguments[:2] == ["tba", "train"]
    summary = train(*arguments[2:])
    assert (summary["ended"], summary["steps"]) == ("finished", 3)
    assert summary["trajectories"]["excluded"] == 0
    assert summary["before"]["queries"] == 10


def test_the_data_file_of_the_readme_is_a_task_with_its_reward(workplace):
    summary = train("words.toml", "--model.model_name_or_path=model")
    assert (summary["ended"], summary["steps"]) == ("finished", 3)
    assert summary["trajectories"]["excluded"] == 0
    assert summary["before"]["queries"] == 1


def test_the_reward_of_the_readme_tells_right_from_wrong():
    space: dict = {}
    exec(files()["reverse.py"], space)
    assert space["reward"](completions=["cba", "abc"], answer=["cba", "cba"]) == [1.0, 0.0]
    assert len(space["train_rows"]()) == 200
    assert len(space["test_rows"]()) == 50


def test_the_script_of_the_readme_trains_in_processes_of_their_own(workplace):
    script = workplace / "train_reverse.py"
    script.write_text(script.read_text().replace('"trainer.steps": 200', '"trainer.steps": 3'))
    done = subprocess.run(
        [sys.executable, script.name], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, done.stdout.split())
    assert 0 <= before <= 1
    assert 0 <= after <= 1
    assert json.loads((workplace / "runs/reverse/summary.json").read_text())["steps"] == 3


def test_every_recipe_and_path_that_the_readme_names_exists():
    root = Path(__file__).parents[1]
    named = re.findall(r"(?:docs|scripts|src/tba)/[\w./-]+\.(?:md|py)", README)
    assert named
    assert [path for path in named if not (root / path).is_file()] == []
    assert [name for name in recipes() if f"`{name}`" not in README] == []
