"""Tables of addresses whose memory was freed: told where a launch goes there, and only there."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.events import StaleAddress

pytest.importorskip("triton")
GONE = 0x7F0000100000
LISTED = """
def listed_kernel(other_ptr, table_ptr, out_ptr, num, BLOCK: tl.constexpr):
    g = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    y_ptr = tl.load(other_ptr + g).to(tl.pointer_type(tl.float32))
    y = tl.load(y_ptr + at, mask=g > num, other=0.0)
    x_ptr = tl.load(table_ptr + g).to(tl.pointer_type(tl.float32))
    x = tl.load(x_ptr + at, mask=g < num, other=0.0)
    tl.store(out_ptr + g * BLOCK + at, x + y)
"""
COPIED = """
def copied_kernel(other_ptr, table_ptr, out_ptr, num, BLOCK: tl.constexpr):
    g = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    number = tl.load(table_ptr + g)
    tl.store(out_ptr + g * BLOCK + at, (number + at).to(tl.float32))
"""


def found(text: str = LISTED, num: int = 2) -> RootCause | None:
    """Of a launch whose second entry is an address without memory."""
    launch = Launch(
        text,
        {"other_ptr": ("I64", (2,)), "table_ptr": ("I64", (2,)), "out_ptr": ("F32", (2, 8))},
        {"num": num},
        grid=(2,),
        constants={"BLOCK": 8},
        held={"table_ptr": np.array([0, GONE], np.int64)},
    )
    bundle = launch.bundle()
    [made] = [event for event in bundle.events if hasattr(event, "launch")]
    table = next(t.id for t in bundle.tensors if t.name == "table_ptr")
    stale = StaleAddress(
        seq=made.seq + 1, step=1, launched=made.seq, tensor=table, index=(1,), address=GONE,
        num_bytes=64, asked_at="program.py:7", freed_at="program.py:8",
    )  # fmt: skip
    bundle = msgspec.structs.replace(bundle, events=(*bundle.events, stale))
    result = diagnose(bundle, allow_source=True)
    assert all(not rung.left_out for rung in result.rungs), result.rungs
    return next((r for r in result.roots if r.cause is Cause.USE_AFTER_FREE), None)


def test_a_launch_that_goes_there_is_told_with_what_frees_it() -> None:
    root = found()
    assert root is not None
    assert (root.kernel, root.argument, root.line) == ("listed", "table_ptr", 8)
    assert root.culprit is not None
    assert (root.culprit.place, root.culprit.does) == ("program.py:8", "frees it")
    assert f"table_ptr[1] = {GONE:#x} leads to memory that is gone" in root.sentence
    assert "asked for it at program.py:7" in root.sentence


def test_an_entry_that_is_left_alone_is_no_fault() -> None:
    assert found(num=1) is None


def test_a_number_of_which_no_pointer_is_made_is_no_address() -> None:
    assert found(COPIED) is None
