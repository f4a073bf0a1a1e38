"""benchmarks/audit_figures.py: what is refused is a row, and rows are kept as they come."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hypocenter.base.errors import BadSetting
from hypocenter.verify.outcome import Mistake, Stage, StageVerdict, Verification
from tools import results_page


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("audit_figures")


def verification(verdict: StageVerdict) -> Verification:
    findings = (Mistake("a bit differs"),) if verdict is StageVerdict.WRONG else ()
    stage = Stage("chunks", "equal?", verdict, findings=findings)
    return Verification("m.gguf", "cpu", "a CPU", "default", 0.0, (stage,), 1.0)


def test_a_family_that_is_refused_or_takes_too_long_is_a_row(
    figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = dict(list(figures.makers_by_architecture().items())[:4])
    monkeypatch.setattr(figures, "makers_by_architecture", lambda: kept)
    monkeypatch.setattr(figures, "MAX_SECONDS", 0.2)
    asked: list[str] = []

    def audit(path: str, *_: object) -> Verification:
        asked.append(path)
        if len(asked) == 1:
            raise BadSetting("context_length", 64, "take at most 49")
        if len(asked) == 2:
            time.sleep(60)
        return verification(StageVerdict.WRONG if len(asked) == 3 else StageVerdict.RIGHT)

    monkeypatch.setattr(figures, "audit", audit)
    told = {"device": "cpu", "num_architectures": 6}
    out = tmp_path / "audit-families-cpu.json"
    figures.write_as_they_come(figures.of_architectures("cpu"), told, out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["refused", "refused", "wrong", "right"]
    assert "take at most 49" in rows[0]["why"]
    assert "took more than 0 s" in rows[1]["why"]
    table = results_page._audited(json.loads(out.read_text()))
    assert "take at most 49" in table
    assert "| wrong | 0 of 1 |" in table
    assert "Of 6 architectures 2 are not in this file" in table


def test_rows_are_there_when_a_later_one_ends_it_all(figures: Any, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"architecture": "llama"}
        raise KeyboardInterrupt

    out = tmp_path / "audit-families-cpu.json"
    with pytest.raises(KeyboardInterrupt):
        figures.write_as_they_come(rows(), {"device": "cpu"}, out)
    assert json.loads(out.read_text()) == {"device": "cpu", "rows": [{"architecture": "llama"}]}
