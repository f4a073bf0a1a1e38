"""What `benchmarks/gpu_coredump.py` makes of a report and a bundle; the programs need a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from core_dumps import bundle_folder
from repository import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_coredump")


def test_each_truth_is_about_a_program_that_is_there(script: Any) -> None:
    for name, truth in script.TRUTH.items():
        text = (script.PROGRAMS / f"{name}.py").read_text()
        assert truth.text in text, name
        assert all(f"{argument}," in text for argument in truth.arguments), name
    others = {path.stem for path in script.PROGRAMS.glob("*.py")} - script.TRUTH.keys()
    of_graphs = importlib.import_module("gpu_graphs").TRUTH.keys()
    assert others - of_graphs == {"graph_speed", "guard_speed", "healthy_launches", "train_speed"}


def row_of(script: Any, name: str, report: dict[str, Any], folder: Path) -> dict[str, Any]:
    bundle = json.loads((bundle_folder(name, folder) / "bundle.json").read_text())
    row = {"program": name, "seconds": 1.0, **script._stopped(bundle), **script._cause(report)}
    judged: dict[str, Any] = script._judged(row, script.TRUTH[name], script.PROGRAMS / f"{name}.py")
    return row | judged


def test_a_row_says_what_was_named_and_whether_it_is_right(script: Any, tmp_path: Path) -> None:
    root = {
        "cause": "index out of range", "sentence": "", "kernel": "embed", "argument": "ids_ptr",
        "line": 15,
    }  # fmt: skip
    right = row_of(script, "far_index", {"roots": [root]}, tmp_path)
    assert (right["kernel_right"], right["line_right"], right["argument_right"]) == (True,) * 3
    assert right["proven"]
    assert right["stopped"] == "embed far_index.py:15 illegal address"
    wrong = row_of(script, "far_index", {"roots": [root | {"argument": "out_ptr"}]}, tmp_path)
    assert not wrong["argument_right"]
    named = row_of(script, "cuda_source", {"roots": []}, tmp_path)
    assert (named["kernel_right"], named["line_right"], named["proven"]) == (True, True, False)
    head, first, *_ = script.table([right, wrong, named])
    assert head.split()[:5] == ["program", "kernel", "line", "arg", "proven"]
    assert first.split()[:5] == ["far_index", "yes", "yes", "yes", "yes"]
