"""The project's own kernels as machine code beside the interpreter, launch by launch.

The tests of `tests/kernels` launch them with real arguments on a simulated GPU. Here they run with
the plugin `checked_emu`, which executes each program as machine code too. Those tests may fail in
it: some want equal bits of two kernels, and the compiler joins products and sums in each another
way. What counts is how far each program is from the interpreter's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

#: Largest difference, as a share of the largest value that the program stores into a tensor of the
#: type; whole numbers are equal. A float32's is of sums in another order and of products of halves.
BOUNDS = {"float32": 2.0**-14, "float16": 2.0**-10}
ROOMS = ("attention", "experts", "linear", "recurrent", "test_kernels.py")


def _run(room: str, arch: str, folder: Path) -> list[dict[str, Any]]:
    found = folder / "found.jsonl"
    support = str(ROOT / "tests" / "support")
    given = {**os.environ, "CHECKED_EMU": str(found), "CHECKED_EMU_TARGET": arch}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "checked_emu", "-p", "no:cacheprovider"]
    line += ["--tier=fast", "--tb=no", "-k", "mi300x", str(ROOT / "tests" / "kernels" / room)]
    run = subprocess.run(
        line, env={**given, "PYTHONPATH": support}, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    return [json.loads(each) for each in found.read_text("utf-8").splitlines()]


def beyond(forms: list[dict[str, Any]]) -> list[str]:
    """The forms that differ beyond the bounds, with by how much."""
    told = []
    for form in forms:
        for dtype, (_, num_other, _, share) in form["types"].items():
            if num_other and share > BOUNDS.get(dtype, 0.0):
                told.append(f"{form['form']}: {num_other} of {dtype} differ, by {share:.2g}")
    return told


@pytest.mark.tier("amd")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("room", ROOMS)
def test_machine_code_gives_what_the_interpreter_gives(
    room: str, arch: str, tmp_path: Path
) -> None:
    forms = _run(room, arch, tmp_path)
    assert forms
    assert beyond(forms) == []
    assert {form["form"]: form["odd"] for form in forms if form["odd"]} == {}


def test_a_difference_beyond_the_bound_is_told() -> None:
    form = {"form": "k {}", "kernel": "k", "arch": "gfx942"}
    types = {"float32": [9, 1, 1.0, 2.0**-13], "int32": [9, 1, 1.0, 1e-9]}
    told = beyond([{**form, "types": types}])
    assert [each.split(", by")[0] for each in told] == [
        "k {}: 1 of float32 differ", "k {}: 1 of int32 differ",
    ]  # fmt: skip
    assert beyond([{**form, "types": {"float32": [9, 1, 1.0, 2.0**-15]}}]) == []
