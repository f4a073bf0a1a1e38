"""`benchmarks/engine_faults.py`: its patches, how a report is judged, and two that are run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hypocenter.doctor.causes import Cause

Script = Any


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("engine_faults")


def test_each_patch_fits_the_source_once_and_leaves_python(script: Script) -> None:
    every = script.all_patches()
    assert len({patch.name for patch in every}) == len(every)
    for patch in every:
        text = (script.SOURCE / patch.file).read_text("utf-8")
        assert text.count(patch.old) == 1, patch.name
        patched = text.replace(patch.old, patch.new)
        assert patched != text, patch.name
        compile(patched, patch.file, "exec")
        assert patch.line in patched, patch.name


def test_the_table_is_large_and_names_what_there_is(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(script.TABLES))
    runs = importlib.import_module("program").RUNS
    every = script.all_patches()
    assert sum(not patch.is_harmless for patch in every) >= 85
    assert sum(patch.is_harmless for patch in every) >= 30
    assert {patch.run for patch in every} == runs.keys()
    for patch in every:
        assert set(patch.causes) <= set(Cause), patch.name
        assert patch.is_harmless == (patch.shows == ""), patch.name
        assert patch.is_harmless or patch.shows in script.SHOWS, patch.name


def test_a_patch_that_fits_no_more_is_refused(script: Script, tmp_path: Path) -> None:
    patch = script.all_patches()[0]
    file = tmp_path / patch.file
    file.parent.mkdir(parents=True)
    file.write_text(patch.old * 2)
    with pytest.raises(ValueError, match="2 places"):
        patch.apply(tmp_path)


@pytest.mark.parametrize(
    ("change", "wrong", "says"),
    [
        (lambda root: root, [], "right"),
        (lambda root: root | {"cause": "misalignment"}, ["cause"], "false"),
        (lambda root: root | {"cause": "access outside its tensor"}, [], "right"),
        (lambda root: root | {"kernel": "delta"}, ["kernel"], "false"),
        (lambda root: root | {"line": 1}, ["line"], "false"),
        (lambda root: root | {"file": "elsewhere.py", "line": 1}, [], "right"),
        (lambda root: root | {"argument": "gate"}, ["argument"], "false"),
        (lambda root: root | {"argument": "gate", "tensor": "out"}, ["argument"], "false"),
        (lambda root: root | {"argument": "out"}, [], "right"),
        (lambda root: root | {"fix": "Make out larger"}, ["fix"], "false"),
        (lambda root: {}, ["cause", "kernel", "argument"], "silent"),
    ],
)
def test_what_is_named_is_held_against_the_truth(
    script: Script,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    wrong: list[str],
    says: str,
) -> None:
    patch, package, root = _of_kernel(script, tmp_path)
    found = change(root)
    judged = script.judged_patch([found] if found else [], patch, package)
    assert [name for name in script.CLAIMS if not judged[f"{name}_right"]] == wrong
    assert (judged["says"], judged["is_right"]) == (says, says == "right")


def test_all_that_is_told_must_be_right(script: Script, tmp_path: Path) -> None:
    patch, package, root = _of_kernel(script, tmp_path)
    judged = script.judged_patch([root, root | {"cause": "misalignment"}], patch, package)
    assert (judged["cause_right"], judged["says"]) == (True, "false")


def test_a_fix_that_is_data_gives_back_what_was_there(script: Script, tmp_path: Path) -> None:
    patch, package, root = _of_kernel(script, tmp_path)
    line = (package / patch.file).read_text().splitlines()[root["line"] - 1].strip()
    was = line.replace(patch.new, patch.old)

    def says(new: str) -> Any:
        edit = {"file": str(package / patch.file), "line": root["line"], "old": line, "new": new}
        return script.judged_patch([root | {"edits": [edit]}], patch, package)["says"]

    assert says(was) == "right"
    assert says(f"{was}  # as before") == "right"
    assert says(was.replace("mask=", "mask=~")) == "false"


def _of_kernel(script: Script, folder: Path) -> tuple[Any, Path, dict[str, Any]]:
    """A patch of a kernel's line, the package with it, and a report that is right."""
    [patch] = [one for one in script.all_patches() if one.name == "padding_of_heads_stored"]
    package = _patched(script, patch, folder)
    lines = (package / patch.file).read_text().splitlines()
    root = {
        "cause": "missing tail mask", "kernel": "delta_rule", "argument": "out_ptr",
        "tensor": "out", "file": str(package / patch.file),
        "line": 1 + next(at for at, text in enumerate(lines) if patch.line in text),
    }  # fmt: skip
    return patch, package, root


def _patched(script: Script, patch: Any, folder: Path) -> Path:
    """A package that has the patch's file alone."""
    package = folder / "hypocenter"
    file = package / patch.file
    file.parent.mkdir(parents=True)
    file.write_text((script.SOURCE / patch.file).read_text())
    patch.apply(package)
    return package


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("engine/kv_cache.py:{}", "right"),
        ("engine/kv_cache.py:1", "false"),
        ("engine/batch.py:{}", "false"),
        ("", "vague"),
    ],
)
def test_the_culprit_of_a_changed_line_of_the_host_is_that_line(
    script: Script, tmp_path: Path, place: str, says: str
) -> None:
    [patch] = [one for one in script.all_patches() if one.name == "blocks_of_short_texts"]
    package = _patched(script, patch, tmp_path)
    lines = (package / patch.file).read_text().splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if patch.new in text)
    root: dict[str, Any] = {
        "cause": patch.causes[0], "kernel": "attention", "argument": "block_tables",
    }  # fmt: skip
    if place:
        root["culprit"] = {"place": f"hypocenter/{place.format(line)}", "does": ""}
    judged = script.judged_patch([root], patch, package)
    assert (judged["says"], judged["is_right"]) == (says, says == "right")
    assert judged["line_right"] == (says == "right")


def test_a_fault_and_a_harmless_patch_are_run_and_told(script: Script, tmp_path: Path) -> None:
    bench = script.Bench(tmp_path)
    bench.make_models(("lab",))
    named = {patch.name: patch for patch in script.all_patches()}
    names = ("chunk_runs_past_its_block", "oldest_block_first", "last_tile_skipped")
    *rows, skipped = [bench.examine(named[name]) for name in names]
    assert [(row["is_right"], row["shown"]) for row in rows] == [(True, "differs"), (True, "none")]
    # The fold makes the NaN; the tiles that were left out are to blame.
    assert (skipped["is_right"], skipped["shown"]) == (True, "nonfinite"), skipped["roots"]
    told = list(script.table(rows))
    totals = "of 1: 1 right, 0 vague, 0 silent, 0 false; 0 alarms on 1 harmless patches"
    assert told[-1] == totals
    assert "stale slot rope_write slots" in told[1]
    # A cause that is named of a harmless patch is an alarm, and so is another answer.
    rows[1] |= {"is_right": False, "roots": rows[0]["roots"]}
    assert "1 alarms on 1" in list(script.table(rows))[-1]
