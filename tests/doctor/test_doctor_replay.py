"""The doctor's replay rung, on kernels that are only in the bundle: red, green, and left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import DIM, HEADS, ROWS, Run, crash, decoder, inputs, step, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report import report_text
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord

WIDTH = HEADS * DIM

SCALE = """@triton.jit
def scale_kernel(x_ptr, counts_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row * width + column, mask=live, other=0.0)
    tl.store(out_ptr + row * width + column, x * 2, mask=live)
"""
LOOKUP = """@triton.jit
def take_kernel(slots_ptr, counts_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    slot = tl.load(slots_ptr + row)
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + slot * width + column, 1.0, mask=column < width)
"""


def scale(old: str = "", new: str = "", *, programs: int = ROWS, **more: Any) -> Bundle:
    """A kernel over 4 rows of 60 columns in tiles of 64, with a text exchanged."""
    run = Run()
    tensors_of_decoder(run, x={"shape": (ROWS, 60)}, out={"shape": (ROWS, 60)})
    assert old in SCALE
    launch = run.launch(
        "scale", {},
        {"x_ptr": "x", "counts_ptr": "counts", "out_ptr": "out", "width": 60},
        source=SCALE.replace(old, new) if old else SCALE, grid=(programs,), constants={"BLOCK": 64},
    )  # fmt: skip
    run.run(run.plan(launch), inputs(counts=[ROWS, 1]))
    return run.bundle(FaultRecord(kind="differs", message=""), **more)


def take(slots: list[int], text: str = LOOKUP) -> Bundle:
    """A kernel that writes rows of `out`, 2**31 elements and more, at `slots`."""
    run = Run()
    rows = (1 << 31) // 64 + 1024
    tensors_of_decoder(run, out={"shape": (rows, 64)})
    launch = run.launch(
        "take", {}, {"slots_ptr": "slots", "counts_ptr": "counts", "out_ptr": "out", "width": 64},
        source=text, grid=(ROWS,), constants={"BLOCK": 64},
    )  # fmt: skip
    run.run(run.plan(launch), inputs(slots=slots))
    return run.bundle(crash())


@dataclass(frozen=True)
class Expected:
    red: Bundle
    cause: Cause
    argument: str
    line: int


FAR = (1 << 31) // 64 + 5
CASES = {
    "store without mask": Expected(
        scale("x * 2, mask=live", "x * 2"), Cause.MISSING_MASK, "out_ptr", 9,
    ),
    "load without mask": Expected(
        scale("tl.load(x_ptr + row * width + column, mask=live, other=0.0)",
              "tl.load(x_ptr + row * width + column)"),
        Cause.MISSING_MASK, "x_ptr", 8,
    ),
    "one column too many": Expected(
        scale("column < width", "column <= width"), Cause.OFF_BY_ONE, "x_ptr", 7,
    ),
    "two programs, one row": Expected(
        scale("tl.program_id(0)", "tl.program_id(0) // 2"), Cause.PROGRAM_RACE, "out_ptr", 3,
    ),
    "slots as 8 bytes": Expected(
        take([1, 2, 3], LOOKUP.replace(
            "tl.load(slots_ptr + row)", "tl.load(slots_ptr.to(tl.pointer_type(tl.int64)) + row)"
        )),
        Cause.DTYPE_WIDTH, "slots_ptr", 6,
    ),
    "32-bit offset": Expected(take([1, 2, FAR]), Cause.OFFSET_OVERFLOW, "out_ptr", 8),
}  # fmt: skip
TWINS = {
    "scale": scale(),
    "take": take([1, 2, 3]),
    "64-bit offset": take(
        [1, 2, FAR], LOOKUP.replace("slots_ptr + row)", "slots_ptr + row).to(tl.int64)")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_line_is_named_and_proven(name: str) -> None:
    expected = CASES[name]
    found = diagnose(expected.red, allow_source=True)
    assert found.roots, [one for one in found.hypotheses if one.verdict is not Verdict.REFUTED]
    root = found.roots[0]
    assert (root.cause, root.argument, root.line) == (
        expected.cause, expected.argument, expected.line,
    )  # fmt: skip
    assert "the same replay with" in root.proof.green
    assert not diagnose(expected.red, allow_source=True, without=("replay",)).roots


def test_a_race_explains_the_difference_from_the_good_run() -> None:
    """Grid and text are others than the good run's, and neither by itself is what is wrong."""
    raced = scale("tl.program_id(0)", "tl.program_id(0) // 2", programs=2 * ROWS)
    assert not diagnose(raced, scale(), allow_source=True, without=("replay",)).roots
    found = diagnose(raced, scale(), allow_source=True)
    assert [(root.cause, root.argument) for root in found.roots] == [
        (Cause.PROGRAM_RACE, "out_ptr")
    ]
    told = {one.cause: one.verdict for one in found.hypotheses}
    assert told[Cause.WRONG_ANSWER] is Verdict.INCONCLUSIVE
    other = diagnose(scale(programs=ROWS - 1), scale(), allow_source=True)
    assert [root.cause for root in other.roots] == [Cause.WRONG_ANSWER]


@pytest.mark.parametrize("name", TWINS)
def test_a_healthy_kernel_has_no_finding(name: str) -> None:
    found = diagnose(TWINS[name], allow_source=True)
    assert found.is_clean, found.roots
    refuted = {one.cause for one in found.hypotheses if one.verdict is Verdict.REFUTED}
    assert {Cause.MISSING_MASK, Cause.OFF_BY_ONE, Cause.PROGRAM_RACE} <= refuted


def test_the_text_of_a_bundle_is_not_run_without_leave() -> None:
    found = diagnose(CASES["store without mask"].red)
    assert not found.roots
    row = next(one for one in found.hypotheses if one.cause is Cause.MISSING_MASK)
    assert row.verdict is Verdict.NOT_TESTED
    assert "the program's own kernel; its recorded source was not run" in row.evidence[0]
    told = report_text(found).split("\n\n")[0]
    assert "--run-sources runs it" in told


def test_the_decoder_of_the_house_replays_clean() -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    found = diagnose(run.bundle(crash(1 << 50)))
    assert not found.roots
    replayed = next(one for one in found.hypotheses if one.cause is Cause.PROGRAM_RACE)
    assert replayed.verdict is Verdict.REFUTED
    assert "2 launches replayed in full" in replayed.evidence[0]


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in list(sys.modules):
        if name.startswith("hypocenter.replay."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "hypocenter.device.triton_lang", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    found = diagnose(CASES["store without mask"].red, allow_source=True)
    row = next(one for one in found.hypotheses if one.cause is Cause.MISSING_MASK)
    assert row.verdict is Verdict.NOT_TESTED
    assert "needs triton, which is not installed" in row.evidence[0]
    assert not found.roots
