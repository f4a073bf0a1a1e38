"""Accesses outside of a program's own tensors, by what leads there: strides, counts, indices."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import Run
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Verdict

ROWS = """@triton.jit
def rows_kernel(x, out, row_stride, column_stride, width, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    v = tl.load(x + row * row_stride + at * column_stride, mask=at < width)
    tl.store(out + row * width + at, v, mask=at < width)
"""
KEYS = """@triton.jit
def keys_kernel(k, out, num_keys, D: tl.constexpr, B: tl.constexpr):
    key = tl.arange(0, B)
    live = key < num_keys
    at = key[:, None] * D + tl.arange(0, D)[None, :]
    v = tl.load(k + at, mask=live[:, None], other=0.0)
    tl.store(out + tl.arange(0, D), tl.sum(v, axis=0))
"""
ENDS = """@triton.jit
def ends_kernel(x, ends, out, B: tl.constexpr):
    row = tl.program_id(0)
    first, last = tl.load(ends + row), tl.load(ends + row + 1)
    total = tl.zeros([B], tl.float32)
    for start in range(first, last, B):
        at = start + tl.arange(0, B)
        total += tl.load(x + at, mask=at < last, other=0.0)
    tl.store(out + row, tl.sum(total, axis=0))
"""
COUNTS = """@triton.jit
def counts_kernel(experts_ptr, counts_ptr, n, B: tl.constexpr):
    at = tl.arange(0, B)
    expert = tl.load(experts_ptr + at, mask=at < n, other=0)
    tl.atomic_add(counts_ptr + expert, 1, mask=at < n)
"""
LARGEST = """@triton.jit
def largest_kernel(x, names, out, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    found = tl.argmax(v, axis=0)
    tl.store(out, tl.load(names + found))
"""
SCATTER = """@triton.jit
def scatter_kernel(x, slots, out, D: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, D)
    slot = tl.load(slots + row)
    tl.store(out + slot * D + at, tl.load(x + row * D + at))
"""
ADD = """@triton.jit
def add_kernel(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)
"""


F32, I32 = "F32", "I32"


WINDOW = """@triton.jit
def window_kernel(x, out, num_out, stride, B: tl.constexpr):
    at = tl.arange(0, B)
    v = tl.load(x + at * stride, mask=at < num_out)
    tl.store(out + at, v, mask=at < num_out)
"""
SHIFTED = """@triton.jit
def shifted_kernel(x, out, n, HALO: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at + HALO, mask=at < n), mask=at < n)
"""
WHOLE = """@triton.jit
def whole_kernel(x, out, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at))
"""

BY_POINTERS = """@triton.jit
def copy_kernel(x, out, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    pointers = x + at
    tl.store(out + at, tl.load(pointers))
"""
COUNTED = """@triton.jit
def count_kernel(x, bins, offset, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    at = v.to(tl.int32) + offset
    tl.atomic_add(bins + at, 1, mask=v > 0)
"""


def rows(row_stride: int, column_stride: int = 1) -> Launch:
    return Launch(
        ROWS,
        {"x": (F32, (20, 48)), "out": (F32, (20, 48))},
        {"row_stride": row_stride, "column_stride": column_stride, "width": 48},
        (20,),
        {"B": 64},
    )


def keys(num_keys: int) -> Launch:
    tensors = {"k": (F32, (20, 16)), "out": (F32, (16,))}
    return Launch(KEYS, tensors, {"num_keys": num_keys}, (1,), {"D": 16, "B": 32})


def ends(*held: int) -> Launch:
    tensors = {"x": (F32, (90,)), "ends": (I32, (4,)), "out": (F32, (3,))}
    return Launch(ENDS, tensors, {}, (3,), {"B": 32}, {"ends": np.array(held, np.int32)})


def counts(last: int) -> Launch:
    held = np.array([0, 1, 2, 3, 0, 1, 2, last], np.int32)
    tensors = {"experts_ptr": (I32, (8,)), "counts_ptr": (I32, (4,))}
    return Launch(COUNTS, tensors, {"n": 8}, (1,), {"B": 8}, {"experts_ptr": held})


def largest(at: int) -> Launch:
    held = np.zeros(64, np.float32)
    held[at] = 1
    tensors = {"x": (F32, (64,)), "names": (I32, (60,)), "out": (I32, (1,))}
    return Launch(LARGEST, tensors, {}, (1,), {"B": 64}, {"x": held})


def residual(num_elements: int) -> Launch:
    tensors = {"x": (F32, (100,)), "y": (F32, (num_elements,))}
    return Launch(ADD, tensors, {"n": 100}, (2,), {"B": 64})


def window(num_out: int) -> Launch:
    tensors = {"x": (F32, (100,)), "out": (F32, (64,))}
    return Launch(WINDOW, tensors, {"num_out": num_out, "stride": 2}, (1,), {"B": 64})


def shifted(halo: int, *shape: int) -> Launch:
    tensors = {"x": (F32, shape), "out": (F32, shape)}
    return Launch(SHIFTED, tensors, {"n": 100}, (2,), {"HALO": halo, "B": 64})


CASES: dict[str, tuple[Launch, Cause, str, str]] = {
    "a stride in bytes": (rows(192), Cause.WRONG_STRIDE, "row_stride", "row_stride = 48"),
    "strides exchanged": (
        rows(1, 48), Cause.WRONG_STRIDE, "row_stride", "row_stride = 48 and column_stride = 1",
    ),
    "more keys than there are": (keys(32), Cause.BAD_SCALAR, "num_keys", "num_keys = 20"),
    "one row of keys too many": (keys(21), Cause.BAD_SCALAR, "num_keys", "num_keys = 20"),
    "an end behind the last": (ends(0, 30, 90, 95), Cause.INDEX_RANGE, "ends", "ends[3] = 90"),
    "a bin behind the last": (counts(4), Cause.INDEX_RANGE, "experts_ptr", "experts_ptr[7] = 3"),
    "a bin before the first": (
        counts(-1), Cause.SENTINEL_CONSUMED, "experts_ptr", "experts_ptr[7] = 0",
    ),
    "an index made of floats": (largest(61), Cause.INDEX_RANGE, "x", "all of x = 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_leads_outside_is_named_and_put_right(name: str) -> None:
    launch, cause, argument, change = CASES[name]
    [root] = launch.diagnosis().roots
    assert (root.cause, root.argument) == (cause, argument)
    assert root.proof.corrected.startswith(change)
    assert "no such finding" in root.proof.green


def test_floats_are_not_to_blame_for_a_pointer_that_is_made_of_theirs() -> None:
    held = np.arange(100, dtype=np.float32)
    tensors = {"x": (F32, (100,)), "out": (F32, (128,))}
    [root] = Launch(BY_POINTERS, tensors, {}, (2,), {"B": 64}, {"x": held}).diagnosis().roots
    assert root.cause is Cause.MISSING_MASK


def test_floats_are_not_to_blame_where_zeros_turn_the_access_off() -> None:
    held = np.arange(16, dtype=np.float32)
    tensors = {"x": (F32, (16,)), "bins": (I32, (16,))}
    launch = Launch(COUNTED, tensors, {"offset": 20}, (1,), {"B": 16}, {"x": held})
    assert not [root for root in launch.diagnosis().roots if root.argument == "x"]


@pytest.mark.parametrize("halo", [1, 24, 25, 30])
def test_a_condition_holds_for_the_index_that_leaves(halo: int) -> None:
    """The mask compares an index, and the access goes further by a number."""
    for shape in ((100,), (4, 25)):
        [root] = shifted(halo, *shape).diagnosis().roots
        assert root.cause is Cause.MISSING_MASK
        assert root.fix == "Mask the access with `at + HALO < n` as well"
        assert root.effect is not None
        assert (root.effect.num_gone, root.effect.num_lost) == (halo, 0)


def test_what_a_window_moves_on_by_is_no_stride_of_a_tensor() -> None:
    [root] = window(60).diagnosis().roots
    assert root.cause is not Cause.WRONG_STRIDE


def test_the_size_of_a_block_is_no_bound() -> None:
    tensors = {"x": (F32, (100,)), "out": (F32, (128,))}
    [root] = Launch(WHOLE, tensors, {}, (2,), {"B": 64}).diagnosis().roots
    assert root.cause is Cause.MISSING_MASK
    assert "B`" not in root.fix


HEALTHY = {
    "strides": rows(48), "keys": keys(20), "ends": ends(0, 30, 60, 90), "counts": counts(3),
    "largest": largest(59), "residual": residual(100),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_the_same_launch_with_what_is_right_has_no_cause(name: str) -> None:
    assert not HEALTHY[name].diagnosis().roots


def test_a_tensor_of_no_elements_is_a_null_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Run.tensor

    def tensor(self: Run, name: str, *facts: Any, **options: Any) -> Any:
        record = made(self, name, *facts, **options)
        if name == "y":  # as torch has it
            self.tensors[name] = record = msgspec.structs.replace(record, address=0, extent_bytes=0)
        return record

    monkeypatch.setattr(Run, "tensor", tensor)
    [root] = residual(0).diagnosis().roots
    assert (root.cause, root.argument) == (Cause.NULL_POINTER, "y")


def test_programs_that_only_meet_because_indices_are_zeros_prove_no_race() -> None:
    tensors = {"x": (F32, (6, 16)), "slots": (I32, (6,)), "out": (F32, (12, 16))}
    unknown = Launch(SCATTER, tensors, {}, (6,), {"D": 16})
    diagnosis = unknown.diagnosis()
    assert not diagnosis.roots
    [told] = [one for one in diagnosis.hypotheses if one.cause is Cause.PROGRAM_RACE]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert "slots of scatter was replayed as zeros" in told.evidence[-1]
    for slots, causes in (([5, 1, 3, 5, 2, 0], [Cause.PROGRAM_RACE]), ([5, 1, 3, 4, 2, 0], [])):
        known = Launch(SCATTER, tensors, {}, (6,), {"D": 16}, {"slots": np.array(slots, np.int32)})
        assert [root.cause for root in known.diagnosis().roots] == causes
