"""What a check of a program finds, the doctor finds in its record, and says what would be right."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import Run

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import FOREIGN, OUTSIDE_PLANS, Launched, Values
from hypocenter.record.fault_record import FaultRecord
from hypocenter.replay.source import installed_kernel, kernel_of, recorded_file

GATHER = """@triton.jit
def gather_kernel(table, ids, out, width, B: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, B)
    idx = tl.load(ids + row)
    x = tl.load(table + idx * width + cols, mask=cols < width)
    tl.store(out + row * width + cols, x, mask=cols < width)
"""
POINTER = GATHER.replace(
    "    x = tl.load(table + idx * width", "    at = table + idx * width\n    x = tl.load(at"
)
LOSS = """@triton.jit
def loss_kernel(logits, labels, out, vocab):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    tl.store(out + row, tl.load(logits + row * vocab + label))
"""
SCALE = """@triton.jit
def thrice_kernel(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(out + i, 3 * tl.load(x + i, mask=mask), mask=mask)
"""
ROWS = """@triton.jit
def rows_kernel(x, out, stride, n, B: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, B)
    mask = cols < n
    v = tl.load(x + row * stride + cols, mask=mask)
    tl.store(out + row * n + cols, v, mask=mask)
"""
COUNT = """@triton.jit
def count_kernel(ids, counts, n, B: tl.constexpr):
    i = tl.arange(0, B)
    at = counts + tl.load(ids + i, mask=i < n, other=0)
    seen = tl.load(at, mask=i < n, other=0)
    tl.store(at, seen + 1, mask=i < n)
"""
COLUMNS = ROWS.replace("row * stride + cols", "row * n + cols * stride")


@dataclass(frozen=True)
class Seen:
    """A launch as a program of anybody's leaves it, and what is to be said of it.

    `tensors` maps a parameter to dtype and shape, `values` to what the host knew of it.
    """

    text: str
    tensors: dict[str, tuple[Any, ...]]
    scalars: dict[str, int]
    grid: tuple[int, ...]
    cause: Cause
    argument: str
    change: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=lambda: {"B": 64})
    evidence: tuple[str, ...] = ()

    def bundle(self) -> Bundle:
        run = Run()
        for name, (dtype, *shape) in self.tensors.items():
            run.tensor(name, dtype, *shape, owner=FOREIGN)
        run.step += 1
        names = {name: name for name in self.tensors}
        kernel = self.text.split("def ")[1].split("_kernel")[0]
        launch = run.launch(
            kernel, {}, names | self.scalars, source=self.text, grid=self.grid,
            constants=self.constants,
        )  # fmt: skip
        event = run.emit(Launched, launch=launch)
        held = [
            Values(run.tensors[name].id, f"I{8 * given.itemsize}", given.shape, given.tobytes())
            for name, array in self.values.items()
            for given in [np.asarray(array, np.int64)]
        ]
        snapshot = Snapshot(run.step, OUTSIDE_PLANS, event.seq, tuple(held))
        ended = FaultRecord(kind="none", message="")
        return run.bundle(ended, snapshots=(snapshot,) if held else ())


TABLE = {"table": ("F32", 100, 64), "ids": ("I64", 4), "out": ("F32", 4, 64)}
CASES = {
    "an index of 2**40": Seen(
        GATHER, TABLE, {"width": 64}, (4,), Cause.INDEX_RANGE, "ids", "ids[2] = 99",
        values={"ids": [1, 5, 2**40, 7]},
    ),
    "the same through a pointer of a line before": Seen(
        POINTER, TABLE, {"width": 64}, (4,), Cause.INDEX_RANGE, "ids", "ids[2] = 99",
        values={"ids": [1, 5, 2**40, 7]},
    ),
    "a label far outside, in a row's own place": Seen(
        LOSS, {"logits": ("F32", 6, 100), "labels": ("I64", 6), "out": ("F32", 6)},
        {"vocab": 100}, (6,), Cause.INDEX_RANGE, "labels", "labels[2] = 99",
        values={"labels": [3, 50, 10**8, 99, 0, 7]}, constants={},
    ),
    "a number of bytes for a number of elements": Seen(
        SCALE, {"x": ("F32", 1000), "out": ("F32", 1000)}, {"n": 4000}, (63,),
        Cause.BAD_SCALAR, "n", "n = 1000, the largest that is right",
    ),
    "one element too many in the number, and < in the mask": Seen(
        SCALE, {"x": ("F32", 1000), "out": ("F32", 1000)}, {"n": 1001}, (16,),
        Cause.BAD_SCALAR, "n", "n = 1000, the largest that is right",
    ),
    "one program too many": Seen(
        ROWS, {"x": ("F32", 7, 60), "out": ("F32", 8, 60)}, {"stride": 60, "n": 60}, (8,),
        Cause.ACCESS_OUTSIDE, "x", "room for", fix="by its index, its mask or the grid",
    ),
    "one program too many, of those that write as well": Seen(
        ROWS, {"x": ("F32", 7, 60), "out": ("F32", 7, 60)}, {"stride": 60, "n": 60}, (8,),
        Cause.MISSING_MASK, "x", "grid (7,), whose programs all have a row",
        fix="Launch 7 programs along x",
    ),
    "row times stride beyond 32 bits": Seen(
        ROWS, {"x": ("I8", (5 << 29) + 64), "out": ("I8", 6, 64)},
        {"stride": 1 << 29, "n": 64}, (5,), Cause.OFFSET_OVERFLOW, "x",
        "`row.to(tl.int64) * stride` in line 6", fix="in 64 bits",
        evidence=("it overflows from program x = 4 on",),
    ),
    "lanes that add to one count": Seen(
        COUNT, {"ids": ("I64", 8), "counts": ("I64", 8)}, {"n": 8}, (1,),
        Cause.LANE_RACE, "counts", "`tl.atomic_add(at, 1, mask=i < n)` in line 6",
        fix="Add with an atomic", values={"ids": [1, 5, 2, 7, 5, 5, 0, 1], "counts": [0] * 8},
    ),
    "column times stride beyond 32 bits, in every program": Seen(
        COLUMNS, {"x": ("I8", (63 << 26) + 128), "out": ("I8", 2, 64)},
        {"stride": 1 << 26, "n": 64}, (1,), Cause.OFFSET_OVERFLOW, "x",
        "`cols.to(tl.int64) * stride` in line 6", fix="in 64 bits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_argument_is_named_and_the_change_was_tried(name: str) -> None:
    seen = CASES[name]
    found = diagnose(seen.bundle(), allow_source=True)
    [root, *_] = found.roots
    assert (root.cause, root.argument) == (seen.cause, seen.argument)
    assert root.proof.corrected.startswith(seen.change)
    assert "the same replay with" in root.proof.green
    assert seen.fix in root.fix
    assert "<=" not in root.fix
    [told] = [one for one in found.hypotheses if one.cause is seen.cause]
    assert set(seen.evidence) <= set(told.evidence)


TWINS: dict[str, dict[str, Any]] = {
    "an index of 2**40": {"values": {"ids": [1, 5, 99, 7]}},
    "a label far outside, in a row's own place": {"values": {"labels": [3, 50, 1, 99, 0, 7]}},
    "a number of bytes for a number of elements": {"scalars": {"n": 1000}},
    "one program too many": {"grid": (7,)},
    "lanes that add to one count": {"text": COUNT.replace("seen + 1", "seen | 1")},
    "row times stride beyond 32 bits": {"grid": (4,)},
}


@pytest.mark.parametrize("name", TWINS)
def test_the_healthy_launch_has_no_finding(name: str) -> None:
    twin = replace(CASES[name], **TWINS[name])
    assert diagnose(twin.bundle(), allow_source=True).is_clean


def test_a_flag_that_several_lanes_raise_is_no_lost_addition() -> None:
    name = "lanes that add to one count"
    found = diagnose(replace(CASES[name], **TWINS[name]).bundle(), allow_source=True)
    races = [one.verdict for one in found.hypotheses if one.cause is Cause.LANE_RACE]
    assert races == [Verdict.REFUTED]


def test_two_versions_of_a_kernel_keep_their_texts() -> None:
    """As in a good run and a bad one: both are of one file, and both are known at a time."""
    texts = [ROWS, ROWS.replace("    mask =", "    # one line more\n    mask =")]
    case = CASES["one program too many"]
    indices = [BundleIndex(replace(case, text=text).bundle()) for text in texts]
    kernels = [kernel_of(index, index.launches[0].launch, allow_source=True) for index in indices]
    shown = [inspect.getsource(kernel.fn) for kernel in kernels]
    assert shown == [text.removeprefix("@triton.jit\n") for text in texts]
    assert recorded_file(kernels[0].fn.__code__.co_filename) == "rows_kernel.py"


def test_a_kernel_of_somebody_elses_is_not_taken_for_ours_of_its_name() -> None:
    text = SCALE.replace("thrice_kernel", "scale_kernel")
    seen = replace(CASES["a number of bytes for a number of elements"], text=text)
    index = BundleIndex(seen.bundle())
    [made] = index.launches
    assert made.launch.function == "scale_kernel"
    assert installed_kernel(index, made.launch) is None
