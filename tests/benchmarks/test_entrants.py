"""The arguments that all comparisons of methods have."""

import pytest
from benchmarks.entrants import parser

ALL = ["tba", "ppo", "online-dpo"]


def test_all_methods_compete_unless_some_are_named():
    known = parser("a comparison", "twin", ALL)
    assert known.parse_args(["--model=m"]).methods == ALL
    assert known.parse_args(["--model=m", "--methods=ppo,tba"]).methods == ["ppo", "tba"]


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        parser("a comparison", "twin", ALL).parse_args(["--model=m", "--methods=tba,grpo"])
    assert ended.value.code == 2
    assert "grpo is no method: name some of tba,ppo,online-dpo" in capsys.readouterr().err
