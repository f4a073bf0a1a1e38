"""benchmarks/verify_figures.py: each mistake has its place, and a row says who found it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import ROOT

from tools import results_page

KERNELS = ROOT / "src" / "hypocenter" / "kernels"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("verify_figures")


def test_each_mistake_changes_its_file(figures: Any) -> None:
    assert len(figures.ON_CPU) >= 10
    assert len(figures.ON_GPU) >= 10
    for plant in (*figures.ON_CPU, *figures.ON_GPU):
        text = (KERNELS / plant.file).read_text()
        assert plant.text(text) != text
        compile(plant.text(text), plant.file, "exec")
    with pytest.raises(ValueError, match="has no"):
        plant.text("")


def test_a_row_says_what_found_a_mistake_or_why_nothing_was_told(
    figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = {"name": "kernels", "findings": [{"where": "rope, 1 rows"}, {"where": "rope, 1 rows"}]}
    told = {"verdict": "wrong", "stages": [stage], "not_run": ["ahead"], "seconds": 2.0}
    said = [SimpleNamespace(stdout=json.dumps(told).encode(), stderr=b"")]
    said.append(SimpleNamespace(stdout=b"", stderr=b"it fell\nno such device\n"))
    monkeypatch.setattr(figures.subprocess, "run", lambda *_, **__: said.pop(0))
    wrong, fell = (figures.verified(str(tmp_path), "cpu") for _ in range(2))
    assert (wrong["caught_by"], wrong["forms"]) == (["kernels"], ["rope, 1 rows"])
    assert fell["why"] == "no such device"
    rows = [{"plant": "a sign", **wrong}, {"plant": "a slot", **fell}]
    table = results_page._plants({"rows": rows})
    assert "| a sign | wrong | kernels | 1 |" in table
    assert "| a slot | no such device |" in table
