import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tba import doctor

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> tuple[str, ...]:
    return tuple(Requirement(text).name for text in requirements)


def without(monkeypatch, missing: str) -> list[doctor.Finding]:
    def only_others(name: str) -> str:
        if name == missing:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", only_others)
    return doctor.examine()


def test_core_and_extras_are_those_of_the_project():
    assert names(PROJECT["dependencies"]) == doctor.CORE
    assert {k: names(v) for k, v in PROJECT["optional-dependencies"].items()} == doctor.EXTRAS


def test_a_whole_installation_lacks_nothing_vital():
    findings = {finding.what: finding for finding in doctor.examine()}
    assert not any(finding.is_fatal for finding in findings.values())
    assert findings["torch"].found == version("torch")
    assert int(findings["cores"].found) >= 1
    assert "bfloat16" in findings["device cpu"].found
    assert findings["memory"].found.endswith(" GiB")
    assert {f"extra {name}" for name in doctor.EXTRAS} <= set(findings)


def test_a_missing_part_of_the_core_is_fatal_and_has_a_remedy(monkeypatch):
    fatal = [finding for finding in without(monkeypatch, "pyarrow") if finding.is_fatal]
    assert [(f.what, f.found, f.remedy) for f in fatal] == [
        ("pyarrow", "missing", "pip install -c constraints.txt -e .")
    ]


@pytest.mark.parametrize("extra", doctor.EXTRAS)
def test_a_missing_extra_is_told_with_its_remedy_and_not_fatal(monkeypatch, extra):
    needed = doctor.EXTRAS[extra][0]
    (finding,) = [f for f in without(monkeypatch, needed) if f.what == f"extra {extra}"]
    assert needed in finding.found
    assert finding.remedy == f"pip install -c constraints.txt -e '.[{extra}]'"
    assert not finding.is_fatal
