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
    assert sum(not patch.is_harmless for patch in every) >= 65
    assert sum(patch.is_harmless for patch in every) >= 20
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
    ("change", "wrong"),
    [
        (lambda root: root, []),
        (lambda root: root | {"cause": "misalignment"}, ["cause"]),
        (lambda root: root | {"kernel": "rope"}, ["kernel"]),
        (lambda root: root | {"line": 1}, ["line"]),
        (lambda root: root | {"file": "elsewhere.py", "line": 1}, []),
        (lambda root: root | {"argument": "gate", "tensor": "gate"}, ["argument"]),
        (lambda root: root | {"argument": "out"}, []),
        (lambda root: {}, ["cause", "kernel", "line", "argument"]),
    ],
)
def test_what_is_named_is_held_against_the_truth(
    script: Script, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], wrong: Any
) -> None:
    [patch] = [one for one in script.all_patches() if one.name == "padding_of_heads_stored"]
    file = tmp_path / patch.file
    file.parent.mkdir(parents=True)
    file.write_text((script.SOURCE / patch.file).read_text())
    patch.apply(tmp_path)
    lines = file.read_text().splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if patch.line in text)
    root = {
        "cause": "missing tail mask", "kernel": "delta_rule", "argument": "out_ptr",
        "tensor": "out", "file": str(file), "line": line,
    }  # fmt: skip
    found = change(root)
    judged = script.judged([found] if found else [], patch, tmp_path)
    names = ("cause", "kernel", "line", "argument")
    assert [name for name in names if not judged[f"{name}_right"]] == wrong
    assert judged["is_right"] == (not wrong)
    assert "culprit_right" not in judged  # of a kernel's line


@pytest.mark.parametrize(
    ("place", "is_right"),
    [
        ("engine/kv_cache.py:{}", True),
        ("engine/kv_cache.py:1", False),
        ("engine/batch.py:{}", False),
    ],
)
def test_the_culprit_of_a_changed_line_of_the_host_is_that_line(
    script: Script, tmp_path: Path, place: str, is_right: bool
) -> None:
    [patch] = [one for one in script.all_patches() if one.name == "blocks_of_short_texts"]
    file = tmp_path / patch.file
    file.parent.mkdir(parents=True)
    file.write_text((script.SOURCE / patch.file).read_text())
    patch.apply(tmp_path)
    line = 1 + next(
        at for at, text in enumerate(file.read_text().splitlines()) if patch.new in text
    )
    root = {
        "cause": patch.causes[0], "kernel": "attention", "argument": "block_tables",
        "culprit": {"place": f"hypocenter/{place.format(line)}", "does": ""},
    }  # fmt: skip
    judged = script.judged([root], patch, tmp_path)
    assert judged["culprit_right"] == judged["is_right"] == is_right


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
    assert told[-1] == "1 of 1 named rightly; 0 alarms on 1 harmless patches"
    assert "stale slot rope_write slots" in told[1]
    # A cause that is named of a harmless patch is an alarm, and so is another answer.
    rows[1] |= {"is_right": False, "roots": rows[0]["roots"]}
    assert "1 alarms on 1" in list(script.table(rows))[-1]
