"""What `benchmarks/gpu_graphs.py` makes of a report; the programs need a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_graphs")


def row(
    script: Any, monkeypatch: pytest.MonkeyPatch, name: str, *roots: dict[str, Any]
) -> list[str]:
    done = SimpleNamespace(stdout=json.dumps({"roots": roots}), stderr="")
    monkeypatch.setattr(script, "_run", lambda command, work: done)
    told: str = script._row(name, script.TRUTH[name], Path())
    return [cell.strip() for cell in told.strip("|").split("|")]


def test_each_truth_is_about_a_line_of_its_program(script: Any) -> None:
    for name, truth in script.TRUTH.items():
        lines = (script.PROGRAMS / f"{name}.py").read_text().splitlines()
        assert sum(line.startswith(truth.text) for line in lines) == 1 or not truth.text, name


def test_a_row_says_whether_the_cause_and_its_line_are_right(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (script.PROGRAMS / "graph_input_reused.py").read_text().splitlines()
    line = lines.index("    del x") + 1
    root = {
        "cause": "captured pointer freed", "kernel": "scale", "argument": "x_ptr",
        "culprit": {"place": f"graph_input_reused.py:{line}", "does": "frees x"},
    }  # fmt: skip
    found = row(script, monkeypatch, "graph_input_reused", root)
    assert (found[1], found[3], found[5]) == ("captured pointer freed", "yes", "yes")
    elsewhere = root | {"culprit": {"place": "graph_input_reused.py:1", "does": ""}}
    assert row(script, monkeypatch, "graph_input_reused", elsewhere)[5] == "no"
    assert row(script, monkeypatch, "graph_input_reused")[5] == "no"
    assert row(script, monkeypatch, "graph_inputs_kept")[5] == "yes"
    assert row(script, monkeypatch, "graph_inputs_kept", root)[5] == "no"
    assert row(script, monkeypatch, "compiled_in_capture")[5] == "yes"
    done = SimpleNamespace(stdout="", stderr="hypo: no GPU here")
    monkeypatch.setattr(script, "_run", lambda command, work: done)
    told = script._row("compiled_graph", script.TRUTH["compiled_graph"], Path())
    assert told == "| compiled_graph | hypo: no GPU here | | | | no |"
