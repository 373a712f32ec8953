"""Data files, and the column names of other frameworks."""

import json
import logging

import pyarrow as pa
import pytest
from pyarrow import parquet

from tba.errors import DataError
from tba.tasks.rows import read_rows, recognise

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_text(content)
        return path

    return write_file


def test_every_kind_of_file_gives_the_same_rows(tmp_path, write):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    files = [
        write("rows.json", json.dumps(ROWS)),
        write("rows.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
        write("rows.csv", "prompt,answer\na,1\nb,2\n"),
        tmp_path / "rows.parquet",
    ]
    assert [read_rows(path) for path in files] == [ROWS] * 4


def test_byte_order_mark_is_no_content(write):
    assert read_rows(write("rows.csv", "\ufeffprompt\na\n")) == [{"prompt": "a"}]
    assert read_rows(write("rows.jsonl", '\ufeff{"prompt": "a"}\n')) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "rows.jsonl is empty"),
        ("rows.jsonl", "\n\n", "rows.jsonl is empty"),
        ("rows.json", "", "rows.json is empty"),
        ("rows.json", "[]", "rows.json is empty"),
        ("rows.csv", "prompt\n", "rows.csv is empty"),
        (
            "rows.jsonl",
            '{"prompt": "a"}\n\n{"prompt"\n',
            "line 3 of .*rows.jsonl is not JSON: Expecting",
        ),
        ("rows.jsonl", '{"prompt": "a"}\n[1]\n', "line 2 of .* is a JSON list, expected an object"),
        ("rows.json", '[{"prompt": "a"},\n 1]', "row 2 of .* is a JSON int, expected an object"),
        ("rows.json", '[\n{"prompt": }]', "line 2 of .*rows.json is not JSON"),
        ("rows.json", "[" * 100_000, "rows.json cannot be read as JSON"),
        ("rows.jsonl", '{"prompt": ' + "9" * 5_000 + "}", "line 1 of .*rows.jsonl cannot be read"),
        ("rows.json", '{"prompt": "a"}', "holds a JSON dict, expected a list"),
        ("rows.csv", "prompt\na,b\n", "line 2 of .* has more fields than the header"),
        ("rows.csv", 'prompt\n"a', "line 1 of .* is not CSV"),
        ("rows.parquet", "PAR", "rows.parquet is not a Parquet file"),
        ("rows.txt", "a", "none of .json, .jsonl, .csv, .parquet"),
    ],
)
def test_bad_file_is_named_with_its_fault(write, name, content, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(name, content))


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        read_rows(tmp_path / "gone.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match=r"folder\.json cannot be read: .*directory"):
        read_rows(tmp_path / "folder.json")
    (tmp_path / "latin.csv").write_bytes(b"prompt\n\xe9\n")
    with pytest.raises(DataError, match=r"latin\.csv cannot be read: .*utf-8"):
        read_rows(tmp_path / "latin.csv")


USER = [{"role": "user", "content": "2+2?"}]
FOREIGN = [
    (
        {
            "prompt": USER,
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "data_source": "x",
        },
        {"ground_truth": "4"},
        "verl or SkyRL",
    ),
    ({"prompt": USER, "label": "4"}, {"label": "4"}, "slime"),
    (
        {"messages": [*USER, {"role": "assistant", "content": "4"}], "ground_truth": "4"},
        {"ground_truth": "4"},
        "open-instruct",
    ),
    ({"question": USER, "answer": "4"}, {}, "verifiers"),
    (
        {"messages": [*USER, {"role": "assistant", "content": "4"}]},
        {"completion": "4"},
        "conversation",
    ),
]


@pytest.mark.parametrize(("row", "kept", "name"), FOREIGN)
def test_foreign_rows_are_recognised_and_reported(row, kept, name, caplog):
    with caplog.at_level(logging.INFO, logger="tba.tasks"):
        [found] = recognise([row], "rows.jsonl")
    assert found["prompt"] == USER
    assert found["answer"] == "4"
    assert {key: found[key] for key in kept} == kept
    assert f"rows.jsonl: read as {name} rows" in caplog.text


def test_own_rows_pass_unchanged_and_unreported(caplog):
    rows = [{"prompt": "2+2?", "answer": "4", "extra": [1]}]
    with caplog.at_level(logging.INFO, logger="tba.tasks"):
        assert recognise(rows, "rows.jsonl") == rows
    assert caplog.text == ""


def test_a_verl_row_without_a_truth_has_no_answer():
    rows = [
        {"prompt": "a", "reward_model": {"ground_truth": "1"}},
        {"prompt": "b", "reward_model": "oops"},
    ]
    assert [row.get("answer") for row in recognise(rows, "rows.jsonl")] == ["1", None]


def test_a_field_of_csv_may_be_as_long_as_any_text(write):
    (row,) = read_rows(write("rows.csv", "prompt\n" + "a" * 200_000 + "\n"))
    assert len(row["prompt"]) == 200_000


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows.jsonl has no rows"),
        ([1], "row 1 of rows.jsonl is a int, expected an object"),
        ([{"q": 1, "a": 2}], "row 1 of rows.jsonl has no column 'prompt'; it has q, a"),
        ([{"prompt": "a"}, {"x": 1}], "row 2 of rows.jsonl has no column 'prompt'; it has x"),
        ([{"prompt": "a"}, {"prompt": 5}], "prompt of row 2 of rows.jsonl is 5, expected a string"),
        ([{"prompt": ""}], "prompt of row 1 .* not empty"),
        ([{"prompt": [{"role": "user"}]}], "prompt of row 1 .* messages with role and content"),
    ],
)
def test_row_without_a_prompt_is_named(rows, message):
    with pytest.raises(DataError, match=message):
        recognise(rows, "rows.jsonl")
