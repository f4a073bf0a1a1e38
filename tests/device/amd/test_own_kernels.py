"""The project's own kernels as machine code beside the interpreter, launch by launch.

The tests of `tests/kernels` launch them with real arguments on a simulated GPU, and those of
`tests/verify/test_stages.py` the ones of `verify`. Here they run with the plugin `checked_emu`,
which executes each program as machine code too. Those tests may fail in it: some want equal bits of
two kernels, and the compiler joins products and sums in each another way. What counts is how far
each program is from the interpreter's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machine.amd_objects import kernel_folders
from repository import ROOT

#: Largest difference, as a share of the largest value that the program stores into a tensor of the
#: type; whole numbers are equal. A float32's is of sums in another order and of products of halves.
BOUNDS = {"float32": 2.0**-14, "float16": 2.0**-10}
#: Kernels that round the weights of keys to halves. Where an exponential is one float apart, its
#: half may be the next one, which is 2^-10 of it; so much is a sum of products with it apart.
HALF_WEIGHTS = ("attention_kernel", "attention_split_kernel")
#: Kernels whose words of 64 bits are numbers, too: sums in another order have other last bits.
NUMBERS_AS_WORDS = ("measure_kernel", "join_figures_kernel")
#: Below `tests/kernels`, or beside it.
ROOMS = (
    "attention", "collective/test_all_reduce.py", "collective/test_peer_sum.py", "experts",
    "linear", "recurrent", "sampling", "test_figures.py", "test_kernels.py", "test_moves.py",
    "../verify/test_stages.py",
)  # fmt: skip
#: Of a room the tests that run, where not all do. Kernels that wait for another GPU are compared
#: where that has written already: where a thread plays it meanwhile, the tests were not seen to
#: end as machine code beside the interpreter; why is not known.
ONLY = {
    "collective/test_peer_sum.py": "each_turn",
    "test_figures.py": "mi300x and (3-2-77 or keys)",
}
#: Tests of the tier sim that run, too: no test of the fast tier launches their kernels.
ALSO = {
    "experts": (
        "test_experts.py::test_experts_linear_gives_the_bits_of_each_expert_alone"
        "[sim:mi300x-70-DType.Q4_K-512]",
        "test_experts.py::test_what_experts_read_is_made_of_rows_where_they_lie"
        "[sim:mi300x-1-DType.F32]",
    )
}
#: Whose tests launch a kernel, where these are not those of its own folder.
ELSEWHERE = {
    "add_parts_kernel": "collective/test_all_reduce.py",
    **dict.fromkeys(
        ("sum_by_chunks_kernel", "sum_by_packets_kernel"), "collective/test_peer_sum.py"
    ),
    **dict.fromkeys(("join_figures_kernel", "kv_read_kernel", "measure_kernel"), "test_figures.py"),
    "attention_fold_round_kernel": "linear",
    **dict.fromkeys(("look_kernel", "probe_kernel", "write_kernel"), "../verify/test_stages.py"),
    **dict.fromkeys(("join_kernel", "mark_kernel", "narrow_kernel"), "test_moves.py"),
    "linear_codes_few_kernel": "test_kernels.py",
    "linear_codes_kernel": "test_kernels.py",
    "linear_float_kernel": "test_kernels.py",
    "gate_norm_kernel": "recurrent",
    "hadamard_kernel": "attention",
    "gather_kernel": "experts",
}


def _run(room: str, arch: str, folder: Path) -> list[dict[str, Any]]:
    found = folder / "found.jsonl"
    support = str(ROOT / "tests" / "support")
    checked = {"CHECKED_EMU": str(found), "CHECKED_EMU_TARGET": arch, "CHECKED_EMU_ALL": "1"}
    given = {**os.environ, **checked}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "checked_emu", "-p", "no:cacheprovider"]
    place = str(ROOT / "tests" / "kernels" / room)
    which = ONLY.get(room, "not cpu and not thread and not guard")
    chosen = [["--tier=fast", "-k", which, place]]
    if room in ALSO:
        chosen.append(["--tier=sim", *(f"{place}/{test}" for test in ALSO[room])])
    for tests in chosen:
        run = subprocess.run(
            [*line, "--tb=no", *tests],
            env={**given, "PYTHONPATH": support}, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    return [json.loads(each) for each in found.read_text("utf-8").splitlines()]


def _home_of(kernel: str, folder: str) -> str:
    """The room whose tests launch a kernel of a folder of `kernels`."""
    if kernel in ELSEWHERE:
        return ELSEWHERE[kernel]
    if folder == "rowwise":
        return "linear" if "round" in kernel else "test_kernels.py"
    return folder


def _homes() -> dict[str, str]:
    """Each kernel, and the room in which it is compared."""
    return {kernel: _home_of(kernel, folder) for kernel, folder in kernel_folders().items()}


def beyond(forms: list[dict[str, Any]]) -> list[str]:
    """The forms that differ beyond the bounds, with by how much."""
    told = []
    for form in forms:
        for dtype, (_, num_other, _, share) in form["types"].items():
            bound = BOUNDS.get(dtype, 0.0)
            if form["kernel"] in HALF_WEIGHTS and dtype == "float32":
                bound = BOUNDS["float16"]
            if form["kernel"] in NUMBERS_AS_WORDS and dtype == "int64":
                bound = 2.0**-40
            if num_other and share > bound:
                told.append(f"{form['form']}: {num_other} of {dtype} differ, by {share:.2g}")
    return told


@pytest.mark.tier("amd")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("room", ROOMS)
def test_machine_code_gives_what_the_interpreter_gives(
    room: str, arch: str, tmp_path: Path
) -> None:
    forms = _run(room, arch, tmp_path)
    homes = _homes()
    assert {kernel for kernel in homes if homes[kernel] == room} <= {e["kernel"] for e in forms}
    assert beyond(forms) == []
    assert {form["form"]: form["odd"] for form in forms if form["odd"]} == {}


def test_each_kernel_has_a_room_in_which_it_is_compared() -> None:
    homes = _homes()
    assert set(homes.values()) <= set(ROOMS)
    assert set(ELSEWHERE) <= set(homes)
    assert set(ONLY) <= set(ROOMS)


def test_a_difference_beyond_the_bound_is_told() -> None:
    form = {"form": "k {}", "kernel": "k", "arch": "gfx942"}
    types = {"float32": [9, 1, 1.0, 2.0**-13], "int32": [9, 1, 1.0, 1e-9]}
    told = beyond([{**form, "types": types}])
    assert [each.split(", by")[0] for each in told] == [
        "k {}: 1 of float32 differ", "k {}: 1 of int32 differ",
    ]  # fmt: skip
    assert beyond([{**form, "types": {"float32": [9, 1, 1.0, 2.0**-15]}}]) == []


def test_a_half_is_allowed_where_weights_are_halves() -> None:
    form = {"form": "k {}", "kernel": "attention_split_kernel", "arch": "gfx942"}
    assert beyond([{**form, "types": {"float32": [9, 1, 1.0, 2.0**-11]}}]) == []
    assert beyond([{**form, "types": {"float32": [9, 1, 1.0, 2.0**-9]}}]) != []
