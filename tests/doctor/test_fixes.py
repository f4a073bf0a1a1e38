"""A fix takes away what was wrong and nothing else: applied, it leaves the twin of the program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.applied_fix import applied
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause

TILE = """@triton.jit
def tile_kernel(a, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    at = a + (rows % m)[:, None] * k + (cols % k)[None, :]
    v = tl.load(at)
    tl.store(c + rows[:, None] * n + cols[None, :], v)
"""
BOTH = "mask = (rows < m)[:, None] & (cols < n)[None, :]"
ROW_MASK = TILE.replace(BOTH, "live = rows < m").replace(", v)", ", v, mask=live[:, None])")
NO_MASK = TILE.replace(f"    {BOTH}\n", "")
PITCH = """@triton.jit
def pitch_kernel(x, o, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    v = tl.load(x + row * BLOCK + col, mask=col < width, other=0.0)
    tl.store(o + row * width + col, v, mask=col < width)
"""
STRIDES = """@triton.jit
def turn_kernel(x, o, by_row, by_col, n, m, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    v = tl.load(x + row * by_row + col * by_col, mask=col < m, other=0.0)
    tl.store(o + row * m + col, v, mask=col < m)
"""
BEFORE = """@triton.jit
def before_kernel(x, o, n):
    pid = tl.program_id(0)
    tl.store(o + pid, tl.load(x + pid) - tl.load(x + pid - 1))
"""
TWO_ROWS = """@triton.jit
def gather_kernel(x, ids, o, n, width, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    row = tl.load(ids + tl.program_id(0)) // 2
    v = tl.load(x + row * width + col)
    tl.store(o + tl.program_id(0) * width + col, v, mask=col < width)
"""
COUNT = """@triton.jit
def count_kernel(x, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0)
    tl.store(o, tl.load(o) + part)
"""
NEITHER = """@triton.jit
def neither_kernel(x, o, p, q, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i) * 2.0, mask=i < 100)
"""


def floats(**shapes: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("F32", shape) for name, shape in shapes.items()}


MADE = Launch(
    TILE, floats(a=(33, 32), c=(33, 40)), {"m": 33, "n": 40, "k": 32}, (3, 3), {"BM": 16, "BN": 16}
)
PITCHED = Launch(PITCH, floats(x=(8, 60), o=(8, 60)), {"width": 60}, (8,), {"BLOCK": 64})
TURNED = Launch(
    STRIDES, floats(x=(8, 60), o=(8, 60)), {"by_row": 1, "by_col": 60, "n": 8, "m": 60}, (8,),
    {"BLOCK": 64},
)  # fmt: skip


@dataclass(frozen=True)
class Expected:
    launch: Launch
    cause: Cause
    argument: str
    line: int
    fix: str


CASES = {
    "a mask that is made and not passed": Expected(
        MADE, Cause.MISSING_MASK, "c", 8, "Mask the access with `mask`"
    ),
    "a mask of rows alone": Expected(
        replace(MADE, text=ROW_MASK), Cause.MISSING_MASK, "c", 8,
        "Mask the access with `cols[None, :] < n` as well",
    ),
    "no mask of two axes": Expected(
        replace(MADE, text=NO_MASK), Cause.MISSING_MASK, "c", 7,
        "Mask the access with `(rows[:, None] < m) & (cols[None, :] < n)`",
    ),
    "a tile's width in place of the pitch": Expected(
        PITCHED, Cause.WRONG_STRIDE, "BLOCK", 5, "Multiply by `width` instead of `BLOCK`"
    ),
    "exchanged strides": Expected(
        TURNED, Cause.WRONG_STRIDE, "by_row", 5,
        "Pass by_row = 60 and by_col = 1 instead of by_row = 1 and by_col = 60",
    ),
    "an element before the first": Expected(
        Launch(BEFORE, floats(x=(16,), o=(16,)), {"n": 16}, (16,)), Cause.MISSING_MASK, "x", 4,
        "Mask the access with `pid - 1 >= 0`",
    ),
    "an update that is lost": Expected(
        Launch(COUNT, floats(x=(256,), o=(1,)), {"n": 256}, (4,), {"BLOCK": 64}),
        Cause.PROGRAM_RACE, "o", 5, "Add with an atomic: `tl.atomic_add(o, part)`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_fix_was_tried_and_applied_leaves_nothing(name: str) -> None:
    expected = CASES[name]
    root = expected.launch.diagnosis().roots[0]
    assert (root.cause, root.argument, root.line) == (
        expected.cause, expected.argument, expected.line,
    )  # fmt: skip
    assert root.fix.startswith(expected.fix)
    assert not root.alternatives
    assert root.effect is not None
    assert root.effect.num_unwritten == 0
    assert not applied(expected.launch, root.edits).diagnosis().roots


def test_conditions_that_fit_equally_are_alternatives() -> None:
    """Two numbers of the value of the axis, and nothing in the text that tells which is meant."""
    launch = Launch(NEITHER, floats(x=(100,), o=(100,)), {"p": 100, "q": 100}, (2,), {"BLOCK": 64})
    text = NEITHER.replace(", mask=i < 100", "")
    root = replace(launch, text=text).diagnosis().roots[0]
    assert root.cause is Cause.MISSING_MASK
    assert root.effect is None
    assert {other.fix for other in root.alternatives} == {
        "Mask the access with `i < p`, at each access of line 4",
        "Mask the access with `i < q`, at each access of line 4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ("tl.store(o + i, 1.0)", "o"),
        ("tl.store(o + tl.program_id(0), tl.sum(tl.load(x + i)))", "x"),
    ],
)
def test_a_condition_that_leaves_out_elements_is_refuted(body: str, argument: str) -> None:
    """Each number would end the access outside, and 20 or 30 accesses inside with it."""
    text = NEITHER[: NEITHER.index("    tl.store")] + f"    {body}\n"
    launch = Launch(text, floats(x=(100,), o=(100,)), {"p": 70, "q": 80}, (2,), {"BLOCK": 64})
    root = launch.diagnosis().roots[0]
    assert root.argument == argument
    assert root.fix == "Mask the access with `i < 100`"


def test_a_divided_index_that_is_right_is_not_blamed() -> None:
    ids = np.array([9, 8, 2, 1], np.int32)
    tensors = floats(x=(5, 60), o=(4, 60)) | {"ids": ("I32", (4,))}
    launch = Launch(
        TWO_ROWS, {"x": tensors["x"], "ids": tensors["ids"], "o": tensors["o"]},
        {"n": 4, "width": 60}, (4,), {"BLOCK": 64}, {"ids": ids},
    )  # fmt: skip
    root = launch.diagnosis().roots[0]
    assert (root.cause, root.argument) == (Cause.MISSING_MASK, "x")
    assert "col < width" in root.fix
    masked = replace(launch, text=TWO_ROWS.replace("+ col)\n", "+ col, mask=col < width)\n"))
    assert not masked.diagnosis().roots
    wrong = replace(masked, held={"ids": np.array([9, 14, 2, 1], np.int32)}).diagnosis().roots[0]
    assert (wrong.cause, wrong.argument) == (Cause.INDEX_RANGE, "ids")
    assert wrong.effect is None


BINS = """@triton.jit
def count_kernel(x, bins, n, num_bins, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + at, mask=at < n, other=0) * num_bins // 256
    tl.atomic_add(bins + found, 1, mask=at < n)
"""


def test_a_divided_entry_that_leads_outside_is_named_and_not_a_mask() -> None:
    """A mask would hide the entry; no bound of it is known."""
    held = np.arange(100, dtype=np.int32)
    tensors = {"x": ("I32", (100,)), "bins": ("I32", (16,))}
    launch = Launch(BINS, tensors, {"n": 100, "num_bins": 16}, (1,), {"BLOCK": 128}, {"x": held})
    assert not launch.diagnosis().roots
    held[70] = 256
    root = replace(launch, held={"x": held}).diagnosis().roots[0]
    assert (root.cause, root.argument) == (Cause.INDEX_RANGE, "x")
    assert "inside 0" not in root.fix


def test_a_larger_tensor_is_no_correction() -> None:
    """The mask is right for the rows that were asked for, and the tensor has fewer of them."""
    short = replace(PITCHED, text=PITCH.replace("* BLOCK", "* width"), tensors=floats(
        x=(8, 60), o=(7, 60)))  # fmt: skip
    root = short.diagnosis().roots[0]
    assert (root.cause, root.argument) == (Cause.ACCESS_OUTSIDE, "o")
    assert root.effect is None


@pytest.mark.parametrize(
    "launch",
    [
        replace(MADE, text=TILE.replace(", v)", ", v, mask=mask)")),
        replace(PITCHED, text=PITCH.replace("* BLOCK", "* width")),
        replace(TURNED, scalars={"by_row": 60, "by_col": 1, "n": 8, "m": 60}),
    ],
)
def test_a_twin_has_no_cause(launch: Launch) -> None:
    assert not launch.diagnosis().roots


GROUPS = """@triton.jit
def groups_kernel(x, o, width, GROUP: tl.constexpr):
    row, group = tl.program_id(0), tl.program_id(1)
    at = row * width + group * GROUP + tl.arange(0, GROUP)
    tl.store(o + row * 128 + group * GROUP + tl.arange(0, GROUP), tl.load(x + at))
"""


def test_a_condition_that_takes_whole_rows_away_is_refuted() -> None:
    """`at < width` silences the access, and with it all rows but the first."""
    launch = Launch(GROUPS, floats(x=(5, 88), o=(5, 128)), {"width": 88}, (5, 3), {"GROUP": 32})
    root = launch.diagnosis().roots[0]
    assert root.argument == "x"
    assert all("at < width" not in fix for fix in (root.fix, *(a.fix for a in root.alternatives)))


DEPTH = """@triton.jit
def depth_kernel(a, o, m, K, BM: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    total = tl.zeros([BM], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        total += tl.sum(tl.load(a + rows[:, None] * K + k[None, :]), axis=1)
    tl.store(o + rows, total, mask=rows < m)
"""


def test_an_index_made_of_the_counter_ends_where_the_loop_ends() -> None:
    """It holds the counter by way of a name: what is left of the loop is no bound of it."""
    launch = Launch(
        DEPTH, floats(a=(32, 50), o=(32,)), {"m": 32, "K": 50}, (2,), {"BM": 16, "BK": 32}
    )
    root = launch.diagnosis().roots[0]
    assert (root.cause, root.argument) == (Cause.MISSING_MASK, "a")
    assert root.fix == "Mask the access with `k[None, :] < K`"
    assert not applied(launch, root.edits).diagnosis().roots
