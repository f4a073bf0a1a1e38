"""An access that a tool saw, of which the program alone does not tell what is to be changed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")

from recorded.program_launch import Launch

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.rungs import watched_access
from hypocenter.doctor.rungs.watched_access import sanitizer
from hypocenter.record.gpu_stop import SanitizerReport

#: Columns behind the end are those of the next row, which another program writes.
GROUP = """
def scale_group_kernel(x_ptr, ends_ptr, out_ptr, n, BM: tl.constexpr, BN: tl.constexpr):
    group = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = 0
    if group > 0:
        begin = tl.load(ends_ptr + group - 1)
    end = tl.load(ends_ptr + group)
    limit = BN * tl.num_programs(1)
    for start in range(begin, end, BM):
        row = start + tl.arange(0, BM)
        inside = (row < end)[:, None] & (column < n)[None, :]
        x = tl.load(x_ptr + row[:, None] * n + column[None, :], mask=inside, other=0.0)
        live = (row < end)[:, None] & (column < limit)[None, :]
        tl.store(out_ptr + row[:, None] * n + column[None, :], x * 2, mask=live)
"""


def root_of(block: tuple[int, int, int] = (1, 2, 0)) -> RootCause | None:
    """Of a launch of which compute-sanitizer saw a store outside in that program."""
    ends = np.array([4, 8], np.int32)
    launch = Launch(
        GROUP,
        {"x_ptr": ("F32", (8, 9)), "ends_ptr": ("I32", (2,)), "out_ptr": ("F32", (8, 9))},
        {"n": 9},
        grid=(2, 3),
        constants={"BM": 4, "BN": 4},
        held={"x_ptr": np.ones((8, 9), np.float32), "ends_ptr": ends},
    )
    report = SanitizerReport(
        tool="compute-sanitizer", problem="out of bounds", operation="store", width_bytes=4,
        kernel="scale_group", file="scale_group_kernel.py", line=16, thread=(0, 0, 0), block=block,
        address=1,
    )  # fmt: skip
    bundle = msgspec.structs.replace(launch.bundle(), reports=(report,))
    claims = sanitizer(Case(bundle, allow_source=True))
    roots = [claim.root for claim in claims if claim.root is not None]
    assert len(roots) <= 1
    return roots[0] if roots else None


def test_what_another_program_is_to_write_is_no_loss() -> None:
    root = root_of()
    assert root is not None
    assert (root.cause, root.argument) == (Cause.MISSING_MASK, "out_ptr")
    assert root.fix == "Mask the access with `inside` instead of `live`"
    assert "(6 of 6 programs)" in root.proof.green
    assert root.proof.red.startswith("compute-sanitizer: store of 4 bytes by scale_group")


def test_of_a_launch_of_many_programs_the_program_alone_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_access, "MAX_PROGRAMS", 5)
    root = root_of()
    assert root is not None
    assert root.cause is Cause.ACCESS_OUTSIDE


def test_a_program_that_stays_inside_is_no_cause_of_what_another_one_did() -> None:
    assert root_of(block=(0, 0, 0)) is None
