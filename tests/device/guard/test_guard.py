"""Guarded kernels in the interpreter: right arguments give the same bytes, wrong ones are reported.

Every tensor lies between red zones, and each zone is looked at after each launch.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call"
# ruff: noqa: C408 (the arguments of a launch read like its call)
import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specimens import guard_kernels as kernels

from hypocenter.base import package
from hypocenter.base.errors import HypoError, LaunchRejected, Unguardable, UsageError
from hypocenter.device.guard.guard import SLOTS, decode_slots, describe, extent_bytes, guard
from hypocenter.device.guard.rows import ViewRows, rows_of
from hypocenter.device.guard.source import KernelSource
from hypocenter.device.interpret.interpret import Pointer, interpreting
from hypocenter.device.triton_lang import interpreter, triton
from hypocenter.record.guard_faults import FAR, AccessFault, GuardSite, SourceLine

ZONE = 4096
ZONE_BYTE = 0xA5
Array = np.ndarray[Any, Any]
F32, F16, I32 = np.float32, np.float16, np.int32


class NativeMemory:
    """Real addresses, read and written by Triton's own functions."""

    def __init__(self) -> None:
        native = interpreter()._interpreter
        self.exact = None
        self.load, self.store = native.load, native.store
        self.atomic_rmw, self.atomic_cas = native.atomic_rmw, native.atomic_cas


def tensor(values: Any, dtype: Any = F32) -> Array:
    """A copy of `values` between two red zones."""
    values = np.asarray(values, dtype)
    arena = np.full(values.nbytes + 2 * ZONE + 64, ZONE_BYTE, np.uint8)
    start = ZONE + -(arena.ctypes.data + ZONE) % 64
    inner: Array = arena[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    inner[...] = values
    return inner


def zones_intact(array: Array) -> bool:
    arena = array
    while isinstance(arena.base, np.ndarray):
        arena = arena.base
    start = array.ctypes.data - arena.ctypes.data
    return bool((arena[:start] == ZONE_BYTE).all()) and bool(
        (arena[start + array.nbytes :] == ZONE_BYTE).all()
    )


def _pointer(array: Any) -> Pointer:
    if isinstance(array, torch.Tensor):
        return Pointer(array.data_ptr(), str(array.dtype).removeprefix("torch."))
    return Pointer(array.ctypes.data, str(array.dtype))


def run(fn: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """All programs of a launch; numpy arrays and torch tensors become pointers."""
    x, y, z = (*grid, 1, 1)[:3]
    given = {
        name: _pointer(value) if hasattr(value, "dtype") else value
        for name, value in arguments.items()
    }
    with interpreting(NativeMemory()) as interpretation:  # type: ignore[arg-type]
        interpretation.set_grid((x, y, z))
        for pid in np.ndindex(z, y, x):
            program = (pid[2], pid[1], pid[0])
            interpretation.run(fn, interpretation.bind(fn, given), program)


def run_guarded(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> list[AccessFault]:
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    strided = [name for name in pointers if rows_of(arguments[name]) is not None]
    guarded = guard(kernel, pointers, with_rows=strided)
    slots = tensor(np.zeros(guarded.num_slots), np.int64)
    tensors = {p: arguments[p] for p in guarded.pointers}
    run(guarded.fn, grid, {**arguments, **guarded.extents(tensors), SLOTS: slots})
    assert zones_intact(slots)
    return guarded.decode(slots, grid)


def arrays_of(arguments: dict[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}


def steps(*shape: int, dtype: Any = F32) -> Array:
    return tensor(np.arange(np.prod(shape)).reshape(shape) % 251 + 1, dtype)


def zeros(*shape: int, dtype: Any = F32) -> Array:
    return tensor(np.zeros(shape), dtype)


def blocks(count: int) -> Array:
    data = np.arange(count * 34, dtype=np.uint8).reshape(count, 34) % 100
    data[:, :2] = np.array([0.5], F16).view(np.uint8)
    return tensor(data, np.uint8)


# name: (kernel, grid, arguments that are right, what makes them wrong, faults expected then)
# A fault: (parameter, operation, functions of the call chain, byte offsets it may name).
K = kernels
ANY = range(-(1 << 35), 1 << 35)
CASES: dict[str, tuple[Any, tuple[int, ...], Any, Any, list[tuple[str, str, str, Any]]]] = {
    "load and store": (
        K.scale_kernel, (3,),
        lambda: dict(x_ptr=steps(129), y_ptr=zeros(129), count=129, factor=3.0, BLOCK=64),
        lambda: dict(y_ptr=zeros(127)),
        [("y_ptr", "store", "scale_kernel", range(127 * 4, 129 * 4, 4))],
    ),
    "mask is right, count is not": (
        K.scale_kernel, (3,),
        lambda: dict(x_ptr=steps(129), y_ptr=zeros(129), count=129, factor=3.0, BLOCK=64),
        lambda: dict(count=130),
        [("x_ptr", "load", "scale_kernel", [516]), ("y_ptr", "store", "scale_kernel", [516])],
    ),
    "no mask, grid too wide": (
        K.unmasked_kernel, (2, 3),
        lambda: dict(x_ptr=steps(6, 16), y_ptr=zeros(6, 16), BLOCK=16),
        lambda: dict(x_ptr=steps(5, 16)),
        [("x_ptr", "load", "unmasked_kernel", range(320, 384, 4))],
    ),
    "parameter reassigned in a loop": (
        K.reassigned_kernel, (1,),
        lambda: dict(x_ptr=steps(3, 100), y_ptr=zeros(3, 100), width=130, BLOCK=64),
        lambda: dict(y_ptr=zeros(2, 100)),
        [("y_ptr", "store", "reassigned_kernel", range(800, 920, 4))],
    ),
    "one of two pointers": (
        K.either_kernel, (1,),
        lambda: dict(a_ptr=steps(32), b_ptr=steps(32), y_ptr=zeros(32), count=32, BLOCK=32),
        lambda: dict(b_ptr=steps(31)),
        [("b_ptr", "load", "either_kernel", [124])],
    ),
    "both of two pointers": (
        K.either_kernel, (1,),
        lambda: dict(a_ptr=steps(32), b_ptr=steps(32), y_ptr=zeros(32), count=32, BLOCK=32),
        lambda: dict(a_ptr=steps(29), b_ptr=steps(31)),
        [("a_ptr", "load", "either_kernel", [120]), ("b_ptr", "load", "either_kernel", [124])],
    ),
    "inner functions": (
        K.calls_kernel, (2,),
        lambda: dict(
            x_ptr=steps(2, 30), y_ptr=steps(2, 30), z_ptr=zeros(2, 30), width=30,
            BLOCK=32,
        ),
        lambda: dict(y_ptr=steps(50)),
        [("y_ptr", "load", "_read _deep calls_kernel", range(200, 240, 4))],
    ),
    "an inner function with two roots": (
        K.two_rooted_call_kernel, (1,),
        lambda: dict(
            a_ptr=steps(16), b_ptr=steps(16), y_ptr=zeros(16), count=16, FIRST=False,
            BLOCK=16,
        ),
        lambda: dict(a_ptr=None, b_ptr=steps(15)),
        [("b_ptr", "load", "_read_either two_rooted_call_kernel", [60])],
    ),
    "atomics": (
        K.atomics_kernel, (1,),
        lambda: dict(
            x_ptr=tensor(np.arange(30) % 8, I32), h_ptr=zeros(8, dtype=I32), count=30,
            BLOCK=32,
        ),
        lambda: dict(x_ptr=tensor(np.arange(30) % 9, I32)),
        [
            ("h_ptr", f"atomic_{name}", "atomics_kernel", [32])
            for name in ("add", "max", "min", "and", "or", "xor", "xchg", "add")
        ],
    ),
    "compare and swap does not wait for a lock that is outside": (
        K.lock_kernel, (3,),
        lambda: dict(lock_ptr=zeros(2, dtype=I32), count_ptr=zeros(1, dtype=I32), which=1),
        lambda: dict(which=5),
        [
            ("lock_ptr", "atomic_cas", "lock_kernel", [20]),
            ("lock_ptr", "atomic_xchg", "lock_kernel", [20]),
        ],
    ),
    "descriptor of rank 2": (
        K.descriptor_kernel, (2,),
        lambda: dict(
            x_ptr=steps(20, 32), y_ptr=zeros(20, 32), rows=20, width=32, ROWS=16,
            WIDTH=32,
        ),
        lambda: dict(y_ptr=zeros(19, 32)),
        [("y_ptr", "make_tensor_descriptor", "descriptor_kernel", [20 * 32 * 4 - 4])],
    ),
    "descriptor of nothing": (
        K.descriptor_kernel, (1,),
        lambda: dict(x_ptr=steps(1, 32), y_ptr=zeros(1, 32), rows=0, width=32, ROWS=16, WIDTH=32),
        lambda: dict(rows=-5),
        [],
    ),
    "descriptors of ranks 1 to 5": (
        K.literal_descriptor_kernel, (1,),
        lambda: dict(x_ptr=steps(16), y_ptr=zeros(1), n0=2, WIDTH=4),
        lambda: dict(n0=3),
        [("x_ptr", "make_tensor_descriptor", "literal_descriptor_kernel", [92])] * 2,
    ),
    "a pointer that is not there": (
        K.optional_kernel, (2,),
        lambda: dict(
            x_ptr=steps(7), bias_ptr=None, y_ptr=zeros(7), count=7, HAS_BIAS=False,
            BLOCK=8,
        ),
        lambda: dict(bias_ptr=tensor([]), HAS_BIAS=True),
        [("bias_ptr", "load", "optional_kernel", range(0, 28, 4))],
    ),
    "a null pointer": (
        K.optional_kernel, (2,),
        lambda: dict(
            x_ptr=steps(7), bias_ptr=steps(7), y_ptr=zeros(7), count=7, HAS_BIAS=True,
            BLOCK=8,
        ),
        lambda: dict(bias_ptr=torch.empty(0)),
        [("bias_ptr", "load", "optional_kernel", range(0, 28, 4))],
    ),
    "cast to wider and narrower elements": (
        K.cast_kernel, (1,),
        lambda: dict(blocks_ptr=blocks(3), y_ptr=zeros(3, 32), count=3, BLOCK=4),
        lambda: dict(blocks_ptr=tensor(blocks(3).reshape(-1)[:101], np.uint8)),
        [("blocks_ptr", "load", "cast_kernel", [101])],
    ),
    "an access that begins inside and ends outside": (
        K.wide_cast_kernel, (1,),
        lambda: dict(x_ptr=steps(16, dtype=np.uint8), y_ptr=zeros(1, dtype=np.int64), at=8),
        lambda: dict(x_ptr=steps(15, dtype=np.uint8)),
        [("x_ptr", "load", "wide_cast_kernel", [8])],
    ),
    "negative offset": (
        K.wide_cast_kernel, (1,),
        lambda: dict(x_ptr=steps(16, dtype=np.uint8), y_ptr=zeros(1, dtype=np.int64), at=0),
        lambda: dict(at=-3),
        [("x_ptr", "load", "wide_cast_kernel", [-3])],
    ),
    "an offset beyond what the record counts is the furthest, and spoils no program": (
        K.wide_cast_kernel, (3,),
        lambda: dict(x_ptr=steps(16, dtype=np.uint8), y_ptr=zeros(1, dtype=np.int64), at=0),
        lambda: dict(at=2**40 + 8),
        [("x_ptr", "load", "wide_cast_kernel", [FAR])],
    ),
    "imported names, comments, strings": (
        K.names_kernel, (1,),
        lambda: dict(x_ptr=steps(60), y_ptr=zeros(60), count=60, BLOCK=64),
        lambda: dict(count=61),
        [("x_ptr", "load", "names_kernel", [240])] * 2
        + [("y_ptr", "store", "names_kernel", [240])] * 2,
    ),
    "tuples": (
        K.tuple_kernel, (1,),
        lambda: dict(x_ptr=steps(30), y_ptr=zeros(30), count=30, BLOCK=32),
        lambda: dict(x_ptr=steps(29)),
        [("x_ptr", "load", "tuple_kernel", [116])],
    ),
    "a method of what a guarded call returns": (
        K.chained_kernel, (1,),
        lambda: dict(x_ptr=steps(4), y_ptr=zeros(2), count=3),
        lambda: dict(count=4, y_ptr=zeros(1)),
        [
            ("y_ptr", "store", "chained_kernel", [4]),
            ("y_ptr", "store", "_touched chained_kernel", [4]),
            ("y_ptr", "load", "_touched chained_kernel", [4]),
            ("x_ptr", "load", "_scalar chained_kernel", [16]),
        ],
    ),
    "closure": (
        K.make_closure_kernel(), (1,),
        lambda: dict(x_ptr=steps(30), y_ptr=zeros(30), count=30, BLOCK=32),
        lambda: dict(x_ptr=steps(29)),
        [("x_ptr", "load", "_times closure_kernel", [116])],
    ),
    "one line": (
        K.one_line_kernel, (1,),
        lambda: dict(x_ptr=steps(2), y_ptr=zeros(1)),
        lambda: dict(x_ptr=steps(1)),
        [("x_ptr", "load", "one_line_kernel", [4])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_arguments_give_the_same_bytes(name: str) -> None:
    kernel, grid, right, _, _ = CASES[name]
    plain, guarded = right(), right()
    before = {parameter: array.copy() for parameter, array in arrays_of(plain).items()}
    run(kernel, grid, plain)
    assert run_guarded(kernel, grid, guarded) == []
    for parameter, array in arrays_of(guarded).items():
        assert array.tobytes() == plain[parameter].tobytes(), parameter
        assert zones_intact(array), parameter
    if name != "descriptor of nothing":
        assert any((array != before[p]).any() for p, array in arrays_of(plain).items())


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_are_reported_and_touch_nothing(name: str) -> None:
    kernel, grid, right, wrong, expected = CASES[name]
    arguments = {**right(), **wrong()}
    found = run_guarded(kernel, grid, arguments)
    for parameter, array in arrays_of(arguments).items():
        assert zones_intact(array), parameter
    assert len(found) == len(expected), found
    for fault, (parameter, operation, functions, offsets) in zip(
        sorted(found, key=lambda f: f.site.calls[-1].line), expected, strict=True
    ):
        assert (fault.parameter, fault.site.operation) == (parameter, operation)
        assert [call.function for call in fault.site.calls] == functions.split()
        assert fault.byte_offset in offsets, fault
        assert fault.null == (not isinstance(arguments[parameter], np.ndarray))
        assert fault.program is not None
        assert all(0 <= p < g for p, g in zip(fault.program, (*grid, 1, 1), strict=False))


@pytest.mark.parametrize(
    ("width", "byte"), [(5, None), (6, 20), (8, 20)], ids=["right", "one more", "whole row"]
)
@pytest.mark.parametrize("kernel", [K.rows_kernel, K.rows_by_call_kernel])
def test_what_lies_between_the_rows_of_a_view_is_not_its_own(
    kernel: Any, width: int, byte: int | None
) -> None:
    """Rows of 5 elements, each 8 from the one before; the last row has nothing behind it."""
    whole, out = steps(4, 8), zeros(4, 8)
    arguments = dict(x_ptr=whole[:, :5], y_ptr=out[:, :5], pitch=8, width=width, BLOCK=8)
    found = run_guarded(kernel, (4,), arguments)
    named = ["x_ptr", "y_ptr"] * (byte is not None)
    assert sorted(fault.parameter for fault in found) == named
    assert all(fault.byte_offset % 32 in range(20, 32, 4) for fault in found)
    assert (out[:, 5:] == 0).all()
    if byte is None:
        assert (out[:, :5] == whole[:, :5]).all()
    assert zones_intact(out)


def test_an_element_that_goes_over_the_end_of_its_row_is_not_inside() -> None:
    """Two f32 as one i64: the row has five of them."""
    whole = steps(4, 8)
    y = zeros(4, dtype=np.int64)
    arguments = dict(x_ptr=whole[:, :5], y_ptr=y, at=4)
    [fault] = run_guarded(K.wide_cast_kernel, (1,), arguments)
    assert (fault.parameter, fault.byte_offset) == ("x_ptr", 16)
    assert run_guarded(K.wide_cast_kernel, (1,), {**arguments, "at": 2}) == []


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 6), (6, 1), None),  # packed
        ((4, 6), (1, 4), None),  # packed the other way round
        ((4, 6), (10, 1), ViewRows(40, 24)),
        ((6, 4), (1, 10), ViewRows(40, 24)),
        ((5, 6, 16), (160, 16, 1), ViewRows(640, 384)),
        ((5, 4, 16), (160, 40, 1), ViewRows(160, 64)),  # one gap, of four rows each
        ((5, 4, 16), (320, 40, 1), ViewRows(160, 64, is_whole=False)),  # and a larger one
        ((5, 4, 16), (330, 40, 1), None),  # an index of the first axis shifts the rows
        ((8,), (2,), ViewRows(8, 4)),
        ((4, 8), (0, 2), ViewRows(8, 4)),  # repeated
        ((4, 8), (1, 1), None),  # windows that overlap
        ((0, 8), (16, 1), None),
        ((2, 1), (1 << 29, 1), None),  # too far apart for its word
    ],
)
def test_rows_are_those_of_the_view(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: ViewRows | None
) -> None:
    assert ViewRows.of(shape, strides, 4) == expected
    if expected is not None:
        index = np.indices(shape).reshape(len(shape), -1)
        offsets = 4 * (np.array(strides) @ index)
        assert (offsets % expected.pitch_bytes <= expected.row_bytes - 4).all(), "its own elements"
    if expected is not None and expected.is_whole:
        rest = set(range(0, int(offsets.max()), 4)) - set(offsets.tolist())
        assert all(at % expected.pitch_bytes >= expected.row_bytes for at in rest)


def test_faults_of_all_programs_and_sites_name_line_expression_and_program() -> None:
    arguments = dict(x_ptr=steps(40), y_ptr=zeros(40), count=129, factor=1.0, BLOCK=64)
    found = run_guarded(K.scale_kernel, (1, 3), {**arguments})
    assert [fault.parameter for fault in found] == ["x_ptr", "y_ptr"]
    source = Path(K.__file__).read_text().splitlines()
    for fault in found:
        here = fault.site.calls[0]
        assert here.file == K.__file__
        assert fault.site.expression in source[here.line - 1]
        assert fault.program in [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert describe(found[0]).splitlines() == [
        f"scale_kernel: load of byte {found[0].byte_offset} of x_ptr, outside its tensor, in "
        f"program {found[0].program}: tl.load(x_ptr + at, mask=inside, other=0.0)",
        f"  {K.__file__}:{found[0].site.calls[0].line} in scale_kernel",
    ]


@pytest.mark.parametrize(
    "kernel",
    [K.scale_kernel, K.reassigned_kernel, K.names_kernel, K.make_closure_kernel()],
    ids=lambda kernel: kernel.__name__,
)
def test_every_statement_stays_on_its_line(kernel: Any) -> None:
    def lines(jit: Any) -> list[int]:
        source = KernelSource(jit)
        statements = [n for s in source.tree.body for n in ast.walk(s) if isinstance(n, ast.stmt)]
        ours = re.compile(r"guard__\w+_base = ")
        return [source.line(n) for n in statements if not ours.match(ast.unparse(n))]

    assert lines(guard(kernel, ["x_ptr", "y_ptr"]).fn) == lines(kernel)


def test_the_rest_of_a_group_is_masked_but_nothing_else() -> None:
    # 16 bytes share a verdict: element 37 is outside, so 36 is not written either.
    x, y = steps(64), zeros(37)
    arguments = dict(x_ptr=x, y_ptr=y, count=64, factor=1.0, BLOCK=64)
    run_guarded(K.scale_kernel, (1,), arguments)
    assert y.tolist() == [*x[:36].tolist(), 0.0]


@pytest.mark.parametrize(
    ("kernel", "pointers", "reason"), K.REFUSED, ids=[k.__name__ for k, _, _ in K.REFUSED]
)
def test_what_cannot_be_guarded_is_refused(kernel: Any, pointers: list[str], reason: str) -> None:
    with pytest.raises(Unguardable, match=re.escape(reason)) as caught:
        guard(kernel, pointers)
    error = caught.value
    assert error.file == K.__file__
    line = Path(K.__file__).read_text().splitlines()[error.line - 1]
    assert error.expression.split("(")[0] in line
    assert str(error).startswith(f"{error.file}:{error.line}: ")


def test_no_access_is_left_in_a_derived_source() -> None:
    for name, kernel in vars(K).items():
        if name.endswith("_kernel") and hasattr(kernel, "arg_names"):
            guarded = guard(kernel, [p for p in kernel.arg_names if p.endswith("_ptr")])
            assert not plain_accesses(guarded.fn), name


def plain_accesses(fn: Any) -> list[str]:
    """Calls that a derived kernel, or a clone it calls, still makes of the language's accesses."""
    source = KernelSource(fn)
    words = re.compile(r"(^|\.)(load|store|atomic_\w+|make_tensor_descriptor)$")
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    found = [c for c in (ast.unparse(n.func) for n in calls) if words.search(c)]
    for name, value in source.function.__globals__.items():
        if name.startswith("guard__call_"):
            found += plain_accesses(value)
    return [call for call in found if not re.match(r"(x|y|one|three|four|five)\.", call)]


def project_kernels() -> Iterator[Any]:
    for file in package.gpu_kernel_files():
        for name, value in vars(importlib.import_module(package.module_name(file))).items():
            if name.endswith("_kernel"):
                yield value


@pytest.mark.parametrize("kernel", list(project_kernels()), ids=lambda kernel: kernel.__name__)
def test_every_kernel_of_the_project_is_guardable(kernel: Any) -> None:
    jit = getattr(kernel, "jit", kernel)
    guarded = guard(jit, [name for name in jit.arg_names if name.endswith("_ptr")])
    assert guarded.sites
    assert {p for site in guarded.sites for p in site.parameters} == set(guarded.pointers)
    assert not plain_accesses(guarded.fn)


def test_only_tensors_of_a_kernel_can_be_guarded() -> None:
    with pytest.raises(UsageError, match="no parameter z_ptr"):
        guard(K.scale_kernel, ["z_ptr"])
    tuned = triton.autotune([triton.Config({"BLOCK": 64})], key=[])(K.scale_kernel)
    with pytest.raises(UsageError, match=r"give its \.fn"):
        guard(tuned, ["x_ptr"])
    with pytest.raises(UsageError, match=r"no @triton\.jit function"):
        guard(len, [])


def test_options_of_the_kernel_are_kept() -> None:
    guarded = guard(K.make_closure_kernel(), ["x_ptr", "y_ptr"])
    assert {"count", "guard__x_ptr_bytes", SLOTS} <= set(guarded.fn.do_not_specialize)
    assert guard(K.make_default_kernel(17), ["x_ptr", "y_ptr"]).fn.params[3].default == 16
    assert guarded.fn.__qualname__.endswith("closure_kernel__guarded")
    noinline = [v for v in vars(K).values() if getattr(v, "noinline", False)]
    assert noinline, "the kernels have an inner function that is not inlined"


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (None, 0),
        (np.zeros((0, 4), F32), 0),
        (np.zeros((3, 5), F32), 60),
        (np.zeros((3, 5), F32)[:, 1:3], (2 * 5 + 1 + 1) * 4),
        (np.zeros((3, 5), F16).T, 30),
        (np.broadcast_to(np.zeros(7, np.uint8), (4, 7)), 7),
        (np.zeros((), np.int64), 8),
        (torch.zeros(3, 5, dtype=torch.bfloat16), 30),
        (torch.zeros(3, 5)[::2, 1:], (2 * 5 + 3 + 1) * 4),
        (torch.zeros(2, 1).expand(2, 9), 8),
        (torch.empty(0, 3), 0),
        (torch.zeros(4)[:, None][:0], 0),
    ],
)
def test_extents_are_those_of_the_view(array: Any, expected: int) -> None:
    assert extent_bytes(array) == expected


def test_extents_refuse_what_has_none() -> None:
    guarded = guard(K.scale_kernel, ["x_ptr", "y_ptr"])
    with pytest.raises(LaunchRejected, match="scale_kernel: x_ptr is a int"):
        guarded.extents({"x_ptr": 4096, "y_ptr": None})
    with pytest.raises(LaunchRejected, match=r"y_ptr has negative strides \(-1,\)"):
        guarded.extents({"x_ptr": None, "y_ptr": np.zeros(3, F32)[::-1]})


SITES = (
    GuardSite(1, "load", ("x_ptr",), "tl.load(x_ptr)", (SourceLine("k.py", 3, "k"),)),
    GuardSite(2, "store", ("x_ptr", "y_ptr"), "tl.store(p, 0)", (SourceLine("k.py", 4, "k"),)),
)


def word(offset: int, program: int = 0, null: bool = False) -> int:
    value = 1 << 63 | null << 62 | program << 36 | offset & (1 << 36) - 1
    return value - (1 << 64)


def test_a_kernel_is_guarded_whatever_decorates_it() -> None:
    assert run_guarded(K.decorated.fn, (1,), dict(x_ptr=steps(15), BLOCK=16, TWICE=2))


def test_a_variant_keeps_nothing_alive_that_its_source_does_not_name() -> None:
    made = guard(K.scale_kernel, ["x_ptr", "y_ptr"]).fn.fn.__globals__
    assert {"tl", "guard__load", "__name__"} <= made.keys()
    assert "decorated" not in made


def test_words_are_decoded() -> None:
    grid = (3, 5, 2)
    found = decode_slots("k", SITES, [7, word(-4, 17), 0, word(1 << 34, 0, True)], grid)
    assert [(f.parameter, f.byte_offset, f.program, f.null) for f in found] == [
        ("x_ptr", -4, (2, 0, 1), False),
        ("y_ptr", 1 << 34, (0, 0, 0), True),
    ]
    assert "null or empty" in describe(found[1])
    assert decode_slots("k", SITES, np.zeros(4, np.int64), grid) == []
    # More programs than the record counts: it does not guess.
    (fault,) = decode_slots("k", SITES, torch.tensor([0, word(8, 5), 0, 0]), (1 << 20, 1 << 7))
    assert fault.program is None
    assert "too large" in describe(fault)
    for offset, is_far in ((FAR, True), (-FAR - 1, True), (FAR - 1, False), (-FAR, False)):
        (fault,) = decode_slots("k", SITES, [0, word(offset), 0, 0], grid)
        assert (fault.byte_offset, fault.is_far) == (offset, is_far)
        assert ("or further" in describe(fault)) == is_far
    with pytest.raises(HypoError, match="holds 0x5, which no guard writes"):
        decode_slots("k", SITES, [0, 5, 0, 0], grid)
