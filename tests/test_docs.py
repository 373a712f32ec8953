"""What the pages in `docs/` claim about the code is true."""

import ast
import json
import re
from pathlib import Path

import pytest

import tba

ROOT = Path(__file__).parents[1]
ALGORITHM = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
LINKS = sorted(set(re.findall(r"`(src/tba/[\w/]+\.py):([\w.]+)`", ALGORITHM)))


def definitions(path: Path) -> set[str]:
    """Return the dotted names of all functions and classes of a file."""

    def below(node: ast.AST, prefix: str) -> set[str]:
        found = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                found |= {name} | below(child, f"{name}.")
        return found

    return below(ast.parse(path.read_text(encoding="utf-8")), "")


@pytest.mark.parametrize(("path", "name"), LINKS)
def test_each_place_that_the_algorithm_page_names_exists(path, name):
    assert name in definitions(ROOT / path)


def test_the_algorithm_page_links_every_line_and_equation():
    for line in ("S1", "S2", "S3", "S4", "S5", "T0", "T1", "T2", "T3"):
        (row,) = re.findall(rf"^\| {line} \|.*$", ALGORITHM, flags=re.MULTILINE)
        assert re.search(r"`src/tba/[\w/]+\.py:[\w.]+`", row), row
    for number in range(1, 6):
        assert f"| ({number}) |" in ALGORITHM
    assert len(LINKS) >= 30


def test_no_link_of_the_algorithm_page_is_written_otherwise():
    mentioned = re.findall(r"`(src/tba/[^`]+)`", ALGORITHM)
    assert {f"{path}:{name}" for path, name in LINKS} == set(mentioned)


def test_relative_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("src/tba/recipes/*/*.md"), ROOT / "README.md"]
    for page in pages:
        for target in re.findall(r"\b(?:docs|scripts|src/tba)/[\w./-]+\.\w+\b", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Train a tiny model for two steps and return the run folder."""
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "runtime.kind": "inline",
        "objective.kind": "tb",
        "warm_start.steps": 0,
        "model.build.hidden_size": 16,
        "model.build.intermediate_size": 16,
        "model.build.num_hidden_layers": 1,
        "task.train_queries": 20,
        "task.test_queries": 4,
        "search.queries_per_batch": 2,
        "search.samples_per_query": 4,
        "buffer.initial_samples": 8,
        "trainer.steps": 2,
        "trainer.samples_per_query": 4,
        "trainer.queries_per_batch": 2,
    }
    tba.train("arithmetic", run_dir=folder, clean=True, progress=False, **settings)
    return folder


def listed(section: str) -> set[str]:
    """Return the names in one section's table of the page."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.M)
    return set(re.findall(r"^\| `([\w.]+)` \|", part, flags=re.MULTILINE))


def test_metrics_page_lists_exactly_what_metrics_jsonl_holds(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert listed("metrics.jsonl") == {name for line in lines for name in line}


def test_metrics_page_lists_exactly_what_summary_json_holds(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    nested = {
        f"{name}.{key}" for name, part in summary.items() if isinstance(part, dict) for key in part
    }
    assert listed("summary.json") == set(summary) | nested
