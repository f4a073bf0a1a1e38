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
    assert len(healthy) == 31
    assert set(script.HEALTHY_ON_GPU) <= healthy


def test_each_truth_says_what_its_fix_is(script: Script) -> None:
    for name, truth in script.TRUTH.items():
        assert truth.fix or name in script.FIXES, name
    assert script.FIXES.keys() <= script.TRUTH.keys()


def test_each_written_program_is_there_and_its_fix_makes_a_twin(script: Script) -> None:
    rows = script.written()
    there = {file.stem for file in script.WRITTEN.glob("*.py")}
    assert there == rows.keys() | {name for name in there if name.startswith("healthy_")}
    for name, row in rows.items():
        wrong, right = (
            Path(script._program(name, twin=twin)[0]).read_text() for twin in (False, True)
        )
        assert row["fix_old"] in wrong, name
        assert row["fix_new"] in right, name
        assert wrong != right, name
        compile(right, name, "exec")
        assert {row["class"], *row["also_classes"]} <= script.CLASSES.keys(), name
        assert row["kernel"] in wrong, name


RIGHT = {
    "cause": "offset overflow", "kernel": "copy_row", "argument": "cache_ptr",
    "file": "cache_rows.py", "line": 19, "fix": "Take row as a 64-bit number", "sentence": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda root: [root], []),
        (lambda root: [root | {"cause": "missing tail mask"}], ["cause"]),
        (lambda root: [root | {"kernel": "other"}], ["kernel"]),
        (lambda root: [root | {"line": 20}], ["line"]),
        (lambda root: [root | {"file": "torch.cu", "line": 20}], []),
        (lambda root: [root | {"argument": "out_ptr"}], ["argument"]),
        (lambda root: [root | {"fix": "Mask the access"}], ["fix"]),
        (lambda root: [root | {"sentence": "make cache_ptr larger"}], ["fix"]),
        (lambda root: [root | {"alternatives": [{"fix": "Mask"}, {"fix": "tl.int64"}]}], []),
        (lambda root: [root | {"alternatives": [{"fix": "Mask"}, {"fix": "a grid"}]}], ["fix"]),
    ],
)
def test_what_is_named_is_held_against_the_truth(
    script: Script, change: Callable[[dict[str, Any]], list[dict[str, Any]]], wrong: list[str]
) -> None:
    program = script.PROGRAMS / "cache_rows.py"
    lines = program.read_text().splitlines()
    root = RIGHT | {"line": 1 + next(i for i, line in enumerate(lines) if "row * stride" in line)}
    judged = script._judged(change(root), "cache_rows", program)
    assert [claim for claim in script.CLAIMS if not judged[f"{claim}_right"]] == wrong
    assert judged["is_right"] == (not wrong)
    assert judged["says"] == ("false" if wrong else "right")
    beside = script._judged([root, *change(root)], "cache_rows", program)
    assert beside["says"] == ("false" if wrong else "right"), "a second root is a claim as well"


def test_what_is_true_and_little_is_no_false_claim(script: Script) -> None:
    program = script.PROGRAMS / "cache_rows.py"
    lines = program.read_text().splitlines()
    at = 1 + next(i for i, line in enumerate(lines) if "row * stride" in line)
    root = RIGHT | {"cause": "access outside its tensor", "line": at, "fix": "Keep it inside"}
    assert script._judged([root], "cache_rows", program)["says"] == "vague"
    assert script._judged([root | {"line": 1}], "cache_rows", program)["says"] == "false"


def test_silence_is_no_false_claim(script: Script) -> None:
    judged = script._judged([], "cache_rows", script.PROGRAMS / "cache_rows.py")
    assert (judged["says"], judged["is_right"]) == ("silent", False)


def test_a_fix_is_put_into_the_text(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f():\n    x = 1\n    y = 2\n")
    edit = {"file": "/where/it/was/a.py", "line": 2, "old": "x = 1", "new": "x = 3"}
    assert script.with_edits(file, [edit]) == "def f():\n    x = 3\n    y = 2\n"
    assert script.with_edits(file, []) is None
    for other in ({"file": "b.py"}, {"line": 9}, {"old": "x = 2"}, {"name": "grid"}):
        assert script.with_edits(file, [edit | other]) is None


def test_a_program_and_its_twin_are_run_and_told(script: Script, tmp_path: Path) -> None:
    row, twin = (
        script.examine("padded_expert", is_twin, is_gpu=False, work=tmp_path)
        for is_twin in (False, True)
    )
    assert (row["is_right"], row["exit_code"]) == (True, 3)
    assert (twin["is_right"], twin["exit_code"]) == (True, 0)
    [first, *_, last] = script.table({"faulty": [row], "healthy": [twin]})
    assert "memcheck" in first
    assert last.startswith("1 of 1 as they should be; 1 right, 0 vague, 0 silent, 0 false; ")
    assert "; 0 of 1 healthy programs not" in last
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
        row |= {f"{claim}_right": True for claim in script.CLAIMS} | {"says": "right", "lost": []}
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
