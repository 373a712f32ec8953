"""Names of functions, and what is wrong with them."""

import pytest

from tba.errors import UserCodeError
from tba.references import describe, load_file, load_function


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "mine.py"
        path.write_text(content)
        return path

    return write_file


def test_function_is_found_by_file_and_by_module(write):
    path = write("def reward(completions):\n    return [1.0]\n")
    assert load_function(f"{path}:reward")(["x"]) == [1.0]
    assert load_function("tba.tasks.rewards:gsm8k").__name__ == "gsm8k"


def test_file_may_define_dataclasses(write):
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Row:\n    a: int\n"
    )
    assert load_file(path).Row(3).a == 3


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(): pass\ndef g(): pass", "h", "mine.py has no function 'h'; it has f, g"),
        ("x = 1", "h", "mine.py has no function 'h'; it has none at all"),
        ("h = 1.5", "h", "mine.py:h is a float, but the reward must be a function"),
        ("def h(:", "h", "mine.py cannot be imported: SyntaxError: invalid syntax"),
        ("import nowhere", "h", "ModuleNotFoundError: No module named 'nowhere'"),
        ("import sys\nsys.exit(3)", "h", "cannot be imported: SystemExit: 3"),
        ("1 / 0", "h", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_bad_file_is_refused_with_the_cause(write, source, name, message):
    with pytest.raises(UserCodeError, match=message):
        load_function(f"{write(source)}:{name}")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py:f", "Python file gone.py does not exist"),
        (
            "nowhere.at_all:f",
            "reward module nowhere.at_all cannot be imported: ModuleNotFoundError",
        ),
        ("tba.tasks.rewards:nothing", "tba.tasks.rewards has no function 'nothing'"),
        ("gsm8k", "'gsm8k' names no source"),
        ("file.py:", "'file.py:' names no source"),
    ],
)
def test_bad_reference_is_refused(reference, message):
    with pytest.raises(UserCodeError, match=message):
        load_function(reference)


def test_description_is_one_short_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 1000))) == 300


def test_a_file_may_import_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("NUMBER = 7")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_mine import NUMBER\ndef f(): return NUMBER"
    )
    assert load_function(f"{tmp_path / 'mine.py'}:f")() == 7
