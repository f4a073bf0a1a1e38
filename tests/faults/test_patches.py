"""Patches of the engine: each fits the source, and two that are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import patch as script
from faults.patch import Bench, Patch, all_patches
from faults.patches.program import RUNS
from faults.row import Platform, Row
from hypocenter.doctor.causes import Cause

ALL = {patch.name: patch for patch in all_patches()}


def test_each_patch_fits_the_source_once_and_leaves_python() -> None:
    assert len(ALL) == len(all_patches())
    for patch in all_patches():
        text = (script.SOURCE / patch.file).read_text("utf-8")
        assert text.count(patch.old) == 1, patch.name
        patched = text.replace(patch.old, patch.new)
        assert patched != text, patch.name
        compile(patched, patch.file, "exec")
        assert all(line in patched for line in patch.truth.lines), patch.name


def test_the_table_is_large_and_names_what_there_is() -> None:
    assert sum(not patch.is_harmless for patch in ALL.values()) >= 85
    assert sum(patch.is_harmless for patch in ALL.values()) >= 30
    assert {patch.program for patch in ALL.values()} == RUNS.keys()
    for patch in ALL.values():
        assert set(patch.truth.causes) <= set(Cause), patch.name
        assert patch.is_harmless == (patch.shows == ""), patch.name
        assert patch.is_harmless or patch.shows in script.SHOWS, patch.name
        on_cpu = RUNS[patch.program].device == "cpu"
        assert patch.platforms == {Platform.CPU if on_cpu else Platform.SIMULATED}, patch.name


def test_a_patch_that_fits_no_more_is_refused(tmp_path: Path) -> None:
    patch = all_patches()[0]
    file = tmp_path / patch.file
    file.parent.mkdir(parents=True)
    file.write_text(patch.old * 2)
    with pytest.raises(ValueError, match="2 places"):
        patch.apply(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda root: root, "right"),
        (lambda root: root | {"cause": "misalignment"}, "false"),
        (lambda root: root | {"cause": "access outside its tensor"}, "vague"),
        (lambda root: root | {"line": 1}, "false"),
        (lambda root: root | {"file": "elsewhere.py", "line": 1}, "vague"),
        (lambda root: root | {"argument": "gate"}, "false"),
        (lambda root: root | {"fix": "Make out larger"}, "false"),
    ],
)
def test_what_is_named_is_held_against_the_truth(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    patch, package, root = _of_kernel(tmp_path)
    assert patch.verdict([change(root)], package).says == says


def test_a_fix_that_is_data_gives_back_what_was_there(tmp_path: Path) -> None:
    patch, package, root = _of_kernel(tmp_path)
    line = (package / patch.file).read_text().splitlines()[root["line"] - 1].strip()
    was = line.replace(patch.new, patch.old)

    def says(new: str) -> str:
        edit = {"file": str(package / patch.file), "line": root["line"], "old": line, "new": new}
        return patch.verdict([root | {"edits": [edit]}], package).says

    assert says(was) == "right"
    assert says(f"{was}  # as before") == "right"
    assert says(was.replace("mask=", "mask=~")) == "false"


def _of_kernel(folder: Path) -> tuple[Patch, Path, dict[str, Any]]:
    """A patch of a kernel's line, the package with it, and a report that is right."""
    patch = ALL["padding_of_heads_stored"]
    package = _patched(patch, folder)
    lines = (package / patch.file).read_text().splitlines()
    [text] = patch.truth.lines
    root = {
        "cause": "missing tail mask", "kernel": "delta_rule", "argument": "out_ptr",
        "tensor": "out", "file": str(package / patch.file), "fix": "Mask the store",
        "line": 1 + next(at for at, line in enumerate(lines) if text in line),
    }  # fmt: skip
    return patch, package, root


def _patched(patch: Patch, folder: Path) -> Path:
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
    tmp_path: Path, place: str, says: str
) -> None:
    patch = ALL["blocks_of_short_texts"]
    package = _patched(patch, tmp_path)
    lines = (package / patch.file).read_text().splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if patch.new in text)
    root: dict[str, Any] = {
        "cause": patch.truth.causes[0], "kernel": "attention", "argument": "block_tables",
        "fix": "Make block_tables from the blocks that the request owns",
    }  # fmt: skip
    if place:
        root["culprit"] = {"place": f"hypocenter/{place.format(line)}", "does": ""}
    assert patch.verdict([root], package).says == says


@pytest.mark.tier("tools")
def test_a_fault_and_a_harmless_patch_are_run_and_told(tmp_path: Path) -> None:
    Bench(tmp_path).make_models(("lab",))
    names = ("chunk_runs_past_its_block", "oldest_block_first")
    [row], [quiet] = (_run(ALL[name], tmp_path) for name in names)
    assert (row.says, row.symptom, row.is_as_wanted) == ("right", "differs", True)
    assert (quiet.says, quiet.symptom, quiet.is_as_wanted) == ("", "none", True), quiet
    again = ALL[names[0]].named_again(tmp_path, ())
    assert again is not None
    assert again.is_right


def _run(patch: Patch, work: Path) -> list[Row]:
    [platform] = patch.platforms
    return patch.run(platform, work)
