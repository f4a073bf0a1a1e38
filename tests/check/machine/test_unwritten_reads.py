"""Reads of what nobody wrote: told where they reach a result, and not where a kernel drops them.

`tests/fixtures/amd/unwritten.hip` has the kernels; executed by our emulator, not on hardware.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT

from hypocenter.check.machine import launch as amd
from hypocenter.check.machine.memory import ArgumentMemory, unwritten
from hypocenter.replay.findings import Finding, FindingKind

CODE = ROOT / "tests" / "fixtures" / "amd" / "unwritten.gfx942.co"
LINES = Path(CODE.with_name("unwritten.hip")).read_text().splitlines()
NUM = 40


def _report(kernel: str, num: int = NUM) -> amd.MachineReport:
    kind: Any = np.int32 if kernel == "addressed" else np.float32
    given: dict[str, Any] = {"out": np.full(128, 9, np.float32)}
    if not kernel.startswith("tile"):
        given["pool"] = unwritten(128 if kernel == "both" else 64, kind)
    if kernel == "both":
        given["pool"] = unwritten(128, kind)
    given |= {"x": np.arange(64, dtype=kind), "n": num}
    return amd.launch(CODE, kernel, ((1,), (64,)), given)


def _text(found: Finding) -> str:
    assert found.line is not None
    return LINES[found.line - 1].strip()


@pytest.mark.parametrize("kernel", ["chosen", "tile_chosen"])
def test_a_value_that_is_dropped_behind_the_load_is_no_finding(kernel: str) -> None:
    report = _report(kernel)
    assert report.findings == ()
    (note,) = (note for note in report.notes if "nobody wrote" in note)
    name = "pool" if kernel == "chosen" else "shared memory"
    assert note.startswith(f"{name} is read where nobody wrote, and no result hangs on it")


@pytest.mark.parametrize(
    "kernel", ["stored", "decided", "addressed", "summed", "largest", "tile_stored"]
)
def test_one_that_reaches_a_store_a_branch_an_address_or_a_sum_is_named(kernel: str) -> None:
    (found,) = _report(kernel).findings
    assert (found.kind, found.operation) == (FindingKind.UNINITIALISED_READ, "load")
    is_tile = kernel.startswith("tile")
    assert found.argument == (None if is_tile else "pool")
    assert "value = " in _text(found)


@pytest.mark.parametrize("kernel", ["stored", "tile_stored", "summed", "largest"])
def test_where_all_was_written_nothing_is_said(kernel: str) -> None:
    report = _report(kernel, num=64)
    assert report.findings == ()
    assert not any("nobody wrote" in note for note in report.notes)


def test_of_two_places_of_code_only_the_one_is_told_that_reaches_a_result() -> None:
    report = _report("both")
    (found,) = report.findings
    assert _text(found) == "out[64 + i] = pool[64 + i];"
    assert any(note.startswith("pool is read where nobody wrote") for note in report.notes)


def test_what_an_earlier_launch_wrote_is_written_for_the_next_one() -> None:
    pool, out, x = unwritten(64), np.zeros(64, np.float32), np.ones(64, np.float32)
    for num in (64, 0):
        given = {"out": out, "pool": pool, "x": x, "n": num}
        assert amd.launch(CODE, "stored", ((1,), (64,)), given).findings == ()


@pytest.mark.parametrize(("kernel", "is_told"), [("counted", True), ("exchanged", False)])
def test_a_counter_that_nobody_set_to_zero(kernel: str, is_told: bool) -> None:
    given = {"counter": unwritten(1, np.int32)}
    found = amd.launch(CODE, kernel, ((1,), (64,)), given).findings
    kinds = [(each.kind, each.argument) for each in found]
    assert kinds == [(FindingKind.UNINITIALISED_READ, "counter")] * is_told


def test_what_is_left_holds_memory_that_is_found_by_an_address_in_an_array() -> None:
    memory, listed = ArgumentMemory({"table": np.zeros(1, np.int64)}), np.zeros(4, np.uint8)
    memory.list_at(1 << 30, "listed", listed)
    before = list(memory.contents())
    listed[3] = 1
    assert list(memory.contents()) != before
