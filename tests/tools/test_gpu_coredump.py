"""What `benchmarks/gpu_coredump.py` makes of a report and a bundle; the programs need a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from recorded.core_dumps import bundle_folder
from repository import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_coredump")


def row_of(script: Any, name: str, roots: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    bundle = json.loads((bundle_folder(name, folder) / "bundle.json").read_text())
    [program] = [one for one in script.faulty_programs() if one.name == name]
    judged: dict[str, Any] = script.judged_row(program, json.dumps({"roots": roots}))
    return {"program": name, "seconds": 1.0, **script._stopped(bundle), **judged}


def test_a_row_says_what_stopped_and_whether_what_was_named_is_right(
    script: Any, tmp_path: Path
) -> None:
    root = {
        "cause": "index out of range", "kernel": "embed", "argument": "ids_ptr",
        "file": "far_index.py", "line": 15, "fix": "Keep ids_ptr[77] inside 0 to 999",
    }  # fmt: skip
    right = row_of(script, "far_index", [root], tmp_path)
    assert right["says"] == "right"
    assert right["stopped"] == "embed far_index.py:15 illegal address"
    wrong = row_of(script, "far_index", [root | {"argument": "out_ptr"}], tmp_path)
    assert wrong["says"] == "false"
    silent = row_of(script, "cuda_source", [], tmp_path)
    head, first, _, last = script.table([right, wrong, silent])
    assert head.split()[:2] == ["program", "says"]
    assert first.split()[:2] == ["far_index", "right"]
    assert last.split()[:2] == ["cuda_source", "silent"]
