"""Shared memory that nobody wrote, in Triton programs as machine code: told where it is stored.

Only a compiler, or a pass of one's own, makes such a program: here one leaves a store out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from outside.checked import hypo_check

PROGRAM = Path(__file__).with_name("turned_tile.py")
#: Each target's stores into shared memory of that tile.
NUM_STORES = {"gfx942": 4, "gfx950": 4, "gfx1100": 8, "gfx1201": 8}


def _report(arch: str, *arguments: int) -> Any:
    done = hypo_check("--on", arch, str(PROGRAM), *map(str, arguments))
    report = json.loads(done.stdout)
    assert report["error"] is None
    assert [launch["unexecuted"] for launch in report["launches"]] == [""], report["launches"]
    return report


def _is_named(report: Any) -> bool:
    """Whether the one finding has kernel, place, instruction and line; False where none is."""
    if not report["findings"]:
        return False
    (found,) = report["findings"]
    assert (found["kind"], found["operation"]) == ("uninitialised read", "load")
    assert found["kernel"] == "turn"
    told = (
        r"byte \d+ of shared memory was written by nobody; wave \d lane \d+: ds_\w+ at pc \+0x\w+"
    )
    assert re.fullmatch(told, found["detail"]), found["detail"]
    lines = PROGRAM.read_text().splitlines()
    (site,) = found["sites"]
    assert site["file"] == str(PROGRAM)
    assert lines[site["line"] - 1].strip().startswith("tl.store(out_ptr")
    return True


@pytest.mark.tier("amd")
def test_what_is_read_and_not_stored_is_no_finding() -> None:
    """Of one row only what the first store wrote is used; the rest is loaded and dropped."""
    assert _is_named(_report("gfx942", 0, 1))
    assert not _is_named(_report("gfx942", 3, 1))


@pytest.mark.tier("amd")
@pytest.mark.parametrize("arch", NUM_STORES)
def test_each_store_that_is_left_out_is_named(arch: str) -> None:
    assert not _is_named(_report(arch))
    for store in range(NUM_STORES[arch]):
        assert _is_named(_report(arch, store)), store
