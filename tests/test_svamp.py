"""The script that turns SVAMP into files for `tba sft` and task `math`."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "scripts" / "svamp.py"
spec = importlib.util.spec_from_file_location("svamp", PATH)
svamp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(svamp)


@pytest.mark.parametrize(
    ("equation", "answer", "completion"),
    [
        ("( 8.0 - 3.0 )", 5.0, " 8 - 3 = 5"),
        ("( ( 76.0 - 64.0 ) * 50.0 )", 600.0, " ( 76 - 64 ) * 50 = 600"),
        ("( 7.0 - ( 2.0 + 3.5 ) )", 1.5, " 7 - ( 2 + 3.5 ) = 1.5"),
        ("( 100.0 / 20.0 )", 5.0, " 100 / 20 = 5"),
    ],
)
def test_a_row_has_its_equation_worked_out(equation, answer, completion):
    row = svamp.row(
        {"Body": "Ann has 8. ", "Question": "How many?", "Equation": equation, "Answer": answer}
    )
    assert row["problem"] == "Ann has 8. How many?"
    assert row["completion"] == completion
    assert row["answer"] == completion.rpartition("= ")[2]


def test_the_split_is_always_alike_and_whole(tmp_path, monkeypatch):
    rows = [
        {"Body": f"B{i}", "Question": "Q?", "Equation": f"( {i}.0 + 1.0 )", "Answer": i + 1.0}
        for i in range(250)
    ]
    source = tmp_path / "svamp.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    found = []
    for out in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr(sys, "argv", ["svamp.py", str(source), str(out)])
        svamp.main()
        found.append([(out / f"{part}.jsonl").read_text() for part in ("train", "test")])
    assert found[0] == found[1]
    assert [text.count("\n") for text in found[0]] == [50, 200]
    assert len(set("".join(found[0]).splitlines())) == 250
