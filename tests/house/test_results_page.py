"""The tables of benchmarks/results/README.md are those of the files beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.results_page import PAGE, RESULTS, page

RANKS = "ranks-2026-11-27.json"


def test_the_page_is_that_of_the_files() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- table: ") == 18
    assert page(text) == text, "run python -m tools.results_page"


def block(name: str) -> str:
    return f"Before.\n\n<!-- table: {name} -->\nold\n<!-- end -->\n\nAfter.\n"


def test_a_figure_of_a_file_is_that_of_its_table(tmp_path: Path) -> None:
    told = json.loads((RESULTS / RANKS).read_text())
    told["speed"] = {"pp2048 @ d2000": {"1": [1000.0, 3000.0, 4000.0], "2": [6000.0]}}
    told["outside"] = {"1": 100.0, "2": 150.5}
    (tmp_path / RANKS).write_text(json.dumps(told))
    made = page(block(RANKS), tmp_path)
    assert "| prompt of 2,048 at depth 2,000 | 3,000 | 6,000 | 2.00 |\n" in made
    assert "| decode, timed from outside | 100.0 | 150.5 | 1.50 |\n" in made
    assert made.startswith("Before.\n\n<!--")
    assert made.endswith("<!-- end -->\n\nAfter.\n")
    assert "old" not in made
    assert page(made, tmp_path) == made


def test_a_file_or_a_table_that_nobody_described_is_refused(tmp_path: Path) -> None:
    (tmp_path / RANKS).write_text("{}")
    assert f"`{RANKS}`" in page(block("files"), tmp_path)
    (tmp_path / "tokens-2027.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokens-2027\.json: say in tools/results_page\.py"):
        page(block("files"), tmp_path)
    with pytest.raises(ValueError, match="no table is made of 'tokens"):
        page(block("tokens-2027.json"), tmp_path)
