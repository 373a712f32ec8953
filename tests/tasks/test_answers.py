"""Pairs and demonstrations in the rows of a task of one's own."""

import json

import pytest

from tba.config import CustomTaskConfig
from tba.errors import DataError
from tba.tasks import load_task
from tba.tasks.answers import read_demonstrations, read_pairs
from tba.tasks.base import Pair

SAID = {"role": "assistant", "content": "yes"}
ASKED = {"role": "user", "content": "a?"}


def test_texts_and_messages_are_answers():
    rows = [
        {"prompt": "a?", "chosen": "yes", "rejected": ""},
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [ASKED, {**SAID, "content": "no"}]},
    ]
    assert read_pairs(rows, "rows") == [Pair("yes", ""), Pair("yes", "no")]


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (3, "is 3"),
        ([], r"is \[\]"),
        (["yes"], r"is \['yes'\]"),
        ([ASKED], r"is \[\{'role': 'user'"),
        ([SAID, ASKED], "is .*assistant"),
        ([SAID, ASKED, SAID], "is .*assistant"),
        ([{"role": "assistant"}], "is .*assistant"),
        ([{"role": "assistant", "content": 3}], "is .*assistant"),
        ("\ud800", r"is '\\ud800'"),
    ],
)
def test_what_is_no_answer_is_named_with_row_and_column(wrong, shown):
    good = {"prompt": "a?", "chosen": "yes", "rejected": "no"}
    with pytest.raises(DataError, match=f"^rejected of row 2 of rows {shown}.*, expected a text"):
        read_pairs([good, {**good, "rejected": wrong}], "rows")


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ({"rejected": "no"}, "row 1 of rows has no column 'chosen'; it has prompt, rejected"),
        ({"chosen": None, "rejected": "no"}, "row 1 of rows has no value in column 'chosen'"),
    ],
)
def test_a_row_without_a_column_is_named(absent, words):
    with pytest.raises(DataError, match=words):
        read_pairs([{"prompt": "a?", **absent}], "rows")


@pytest.fixture
def rows_file(tmp_path):
    """Twelve rows of which two are too long to be asked, and all but these ask the same."""
    path = tmp_path / "rows.jsonl"
    prompts = ["much too long" if n in (3, 7) else "a?" for n in range(12)]
    rows = [
        {"prompt": prompt, "chosen": f"yes {n}", "rejected": f"no {n}"}
        for n, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_training_query_has_the_pair_of_its_row(rows_file, tokenizer):
    config = CustomTaskConfig(train_file=rows_file, test_share=0.25, max_prompt_length=6)
    task = load_task(config, tokenizer, given="pairs")
    assert task.skipped == 2
    assert len(task.train) + len(task.test) == 10
    expected = [Pair(q.columns["chosen"], q.columns["rejected"]) for q in task.train]
    assert task.pairs == expected
    assert len({pair.chosen for pair in task.pairs}) == len(task.train), "none is lost"
    assert [q.query_id for q in task.train] == list(range(len(task.train)))
    assert task.reward.functions == ()
    assert load_task(config, tokenizer).pairs is None


def test_a_python_file_may_give_pairs_and_no_reward(tmp_path, tokenizer):
    file = tmp_path / "mine.py"
    file.write_text(
        "def train_rows(): return [{'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}] * 2\n"
    )
    task = load_task(CustomTaskConfig(file=file), tokenizer, given="pairs")
    assert (task.pairs, task.reward.functions) == ([Pair("b", "c")], ())


# --- demonstrations ---------------------------------------------------------------------------


def test_texts_and_messages_are_demonstrations_under_either_name():
    rows = [
        {"prompt": "a?", "completion": "yes"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": "a?", "response": "no"},
        {"prompt": "a?", "completion": None, "response": "maybe"},
    ]
    assert read_demonstrations(rows, "rows") == ["yes", "yes", "no", "maybe"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "2"}, "row 2 of rows has no demonstration: .* but has prompt, answer"),
        ({"completion": None}, "row 2 of rows has no demonstration: .* but has prompt$"),
        ({"completion": ""}, "completion of row 2 of rows is empty"),
        ({"completion": [ASKED]}, "completion of row 2 of rows is .*, expected a text or a list"),
        ({"response": "\ud800"}, r"response of row 2 of rows is '\\ud800'"),
    ],
)
def test_a_row_without_a_usable_demonstration_is_named(row, words):
    with pytest.raises(DataError, match=words):
        read_demonstrations(
            [{"prompt": "a?", "completion": "yes"}, {"prompt": "a?", **row}], "rows"
        )


def test_each_query_has_the_demonstration_of_its_row(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    prompts = ["much too long" if n in (3, 7) else f"{n}?" for n in range(12)]
    rows = [{"prompt": p, "completion": f"yes {n}"} for n, p in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CustomTaskConfig(train_file=path, test_share=0.25, max_prompt_length=6)
    task = load_task(config, tokenizer, given="demonstrations")
    assert task.demonstrations == [query.columns["completion"] for query in task.train]
    assert task.test_demonstrations == [query.columns["completion"] for query in task.test]
    assert len(task.train) + len(task.test) == 10
    assert task.pairs is None
    plain = load_task(config, tokenizer)
    assert (plain.demonstrations, plain.test_demonstrations) == (None, None)
