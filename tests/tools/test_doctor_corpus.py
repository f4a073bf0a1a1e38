"""`benchmarks/doctor_corpus.py`: its table of what is to be named, and how a report is judged."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

Script = Any


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("doctor_corpus")


def test_each_truth_is_about_a_program_that_is_there(script: Script) -> None:
    assert {path.stem for path in script.PROGRAMS.glob("*.py")} == script.TRUTH.keys()
    for name, truth in script.TRUTH.items():
        text = (script.PROGRAMS / f"{name}.py").read_text()
        assert truth.text in text, name
        assert '"right" in sys.argv' in text, name
        assert truth.causes, name
    healthy = {path.stem for path in (script.PROGRAMS / "healthy").glob("*.py")}
    assert len(healthy) == 20
    assert set(script.HEALTHY_ON_GPU) <= healthy


RIGHT = {
    "cause": "offset overflow", "kernel": "copy_row", "argument": "cache_ptr",
    "file": "cache_rows.py", "line": 19,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda root: root, []),
        (lambda root: root | {"cause": "missing tail mask"}, ["cause"]),
        (lambda root: root | {"kernel": "other"}, ["kernel"]),
        (lambda root: root | {"line": 20}, ["line"]),
        (lambda root: root | {"file": "torch.cu", "line": 20}, []),
        (lambda root: root | {"argument": "out_ptr"}, ["argument"]),
        (lambda root: {}, ["cause", "kernel", "argument"]),
    ],
)
def test_what_is_named_is_held_against_the_truth(
    script: Script, change: Callable[[dict[str, Any]], dict[str, Any]], wrong: list[str]
) -> None:
    program = script.PROGRAMS / "cache_rows.py"
    lines = program.read_text().splitlines()
    root = RIGHT | {"line": 1 + next(i for i, line in enumerate(lines) if "row * stride" in line)}
    found = change(root)
    judged = script._judged([found] if found else [], script.TRUTH["cache_rows"], program)
    assert [
        key for key in ("cause", "kernel", "line", "argument") if not judged[f"{key}_right"]
    ] == (wrong)
    assert judged["is_right"] == (not wrong)


def test_a_program_and_its_twin_are_run_and_told(script: Script, tmp_path: Path) -> None:
    row, twin = (
        script.examine("padded_expert", is_twin, is_gpu=False, work=tmp_path)
        for is_twin in (False, True)
    )
    assert (row["is_right"], row["exit_code"]) == (True, 3)
    assert (twin["is_right"], twin["exit_code"]) == (True, 0)
    [first, *_, last] = script.table({"faulty": [row], "healthy": [twin]})
    assert "memcheck" in first
    assert last.startswith("1 of 1 named rightly; 0 of 1 healthy programs not")
    twin |= {"is_right": False, "exit_code": 3}
    without = script.ablation(["padded_expert"], [row], tmp_path, jobs=1)
    assert without[""] == without["limits"] == ["padded_expert"]
    assert without["replay"] == []
    told = list(script.table({"faulty": [row], "healthy": [twin], "ablation": without}))
    assert "without replay: 0 named, 1 fewer" in told
    assert "healthy padded_expert: exit code 3, []" in told


@pytest.mark.parametrize(
    ("options", "is_right", "status"),
    [(["--strict"], False, 1), (["--strict"], True, 0), ([], False, 0)],
)
def test_strict_fails_where_a_program_is_judged_wrongly(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    is_right: bool,
    status: int,
) -> None:
    def examined(name: str, twin: bool, **_: Any) -> dict[str, Any]:
        row = {"program": name, "seconds": 1.0, "exit_code": 0, "roots": [], "options": ()}
        row["lost"] = []
        return {**row, "is_right": is_right or not twin}

    monkeypatch.setattr(script, "examine", examined)
    command = ["doctor_corpus.py", str(tmp_path), "--only", "padded_expert", *options]
    monkeypatch.setattr(script.sys, "argv", command)
    assert script.main() == status


def test_a_launch_that_was_lost_is_read_from_the_report(script: Script) -> None:
    lost = {"kind": "launch not recorded", "what": "2 launches of k", "reason": "not recorded: x"}
    other = {"kind": "not recorded", "what": "a GPU", "reason": ""}
    report = json.dumps({"roots": [], "unseen": [other, lost]})
    assert script.lost_of(report) == ["2 launches of k: not recorded: x"]
    assert script.lost_of("") == []
