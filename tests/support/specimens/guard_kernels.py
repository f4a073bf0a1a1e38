"""Small Triton kernels in every shape that the guard must follow, and some that it must refuse."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, ANN204, RUF059, SIM108
import sys

import triton
import triton.language as T
from triton.language import load

tl = T


@triton.jit
def scale_kernel(x_ptr, y_ptr, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, x * factor, mask=inside)


@triton.heuristics({"TWICE": lambda given: 2 * given["BLOCK"]})
@triton.jit
def decorated(x_ptr, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), TWICE)


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = (row * tl.num_programs(0) + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def reassigned_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    while width > 0:  # the first statement is a compound one
        x_ptr += tl.program_id(0) * 0
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < width) + 1.0, mask=at < width)
        x_ptr += 100
        y_ptr += 100
        width -= 50


@triton.jit
def either_kernel(a_ptr, b_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    where = tl.where(at % 2 == 0, a_ptr + at, b_ptr + at)
    tl.store(y_ptr + at, tl.load(where, mask=at < count), mask=at < count)


@triton.jit
def _row(pointer, row, stride):
    return pointer + row * stride


@triton.jit
def _read(pointer, inside):
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _deep(pointer, at, inside):
    return _read(pointer + at, inside)


@triton.jit(noinline=True)
def _scalar(pointer, at):
    return tl.load(pointer + at)


@triton.jit
def rows_kernel(x_ptr, y_ptr, pitch, width, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    at = row * pitch + columns
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=columns < width), mask=columns < width)


@triton.jit
def rows_by_call_kernel(x_ptr, y_ptr, pitch, width, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = _read(_row(x_ptr, row, pitch) + columns, columns < width)
    tl.store(_row(y_ptr, row, pitch) + columns, x, mask=columns < width)


@triton.jit
def calls_kernel(x_ptr, y_ptr, z_ptr, width, BLOCK: tl.constexpr):
    """One inner function, called twice with arguments of the same types."""
    at = tl.arange(0, BLOCK)
    row, other = _row(x_ptr, tl.program_id(0), width), _row(y_ptr, tl.program_id(0), width)
    x = _deep(row, at, at < width)
    y = _deep(other, inside=at < width, at=at)
    tl.store(_row(z_ptr, tl.program_id(0), width) + at, x + y, mask=at < width)


@triton.jit
def _read_either(pointer, at, inside):
    return tl.load(pointer + at, inside, 0.0)


@triton.jit
def two_rooted_call_kernel(a_ptr, b_ptr, y_ptr, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if FIRST:
        chosen = a_ptr
    else:
        chosen = b_ptr
    tl.store(y_ptr + at, _read_either(chosen, at, at < count), at < count)


@triton.jit
def atomics_kernel(x_ptr, h_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bin = tl.load(x_ptr + at, mask=at < count, other=0)
    inside = at < count
    tl.atomic_add(h_ptr + bin, 3, mask=inside)
    tl.atomic_max(h_ptr + bin, 2, inside)
    tl.atomic_min(h_ptr + bin, 1000, mask=inside, sem="relaxed")
    tl.atomic_and(h_ptr + bin, 0xFFFF, inside)
    tl.atomic_or(h_ptr + bin, 16, mask=inside)
    tl.atomic_xor(h_ptr + bin, 5, mask=inside, scope="cta")
    tl.atomic_xchg(pointer=h_ptr + bin, val=bin, mask=inside)
    (h_ptr + bin).atomic_add(1, mask=inside)


@triton.jit
def lock_kernel(lock_ptr, count_ptr, which):
    while tl.atomic_cas(lock_ptr + which, 0, 1) == 1:
        pass
    tl.store(count_ptr, _scalar(count_ptr, 0) + 1)
    tl.atomic_xchg(lock_ptr + which, 0)


@triton.jit
def descriptor_kernel(x_ptr, y_ptr, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    x = tl.make_tensor_descriptor(
        x_ptr, shape=[rows, width], strides=[width, 1], block_shape=[ROWS, WIDTH]
    )
    y = tl.make_tensor_descriptor(
        base=y_ptr, shape=[rows, width], strides=[width, 1], block_shape=[ROWS, WIDTH]
    )
    first = tl.program_id(0) * ROWS
    y.store([first, 0], x.load([first, 0]) * 2.0)


@triton.jit
def literal_descriptor_kernel(x_ptr, y_ptr, n0, WIDTH: tl.constexpr):
    """Ranks 1, 3, 4 and 5, and literals in the shape."""
    one = tl.make_tensor_descriptor(x_ptr, [16], [1], [16])
    three = tl.make_tensor_descriptor(x_ptr, [2, 2, 4], [8, 4, 1], [2, 2, WIDTH])
    four = tl.make_tensor_descriptor(x_ptr, [n0, 1, 2, 4], [8, 8, 4, 1], [2, 1, 2, WIDTH], "zero")
    five = tl.make_tensor_descriptor(x_ptr, [1, n0, 1, 2, 4], [16, 8, 8, 4, 1], [1, 2, 1, 2, 4])
    total = tl.sum(one.load([0])) + tl.sum(three.load([0, 0, 0]))
    total += tl.sum(four.load([0, 0, 0, 0])) + tl.sum(five.load([0, 0, 0, 0, 0]))
    tl.store(y_ptr, total)


@triton.jit
def optional_kernel(x_ptr, bias_ptr, y_ptr, count, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) > 0:
        return
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, x, mask=at < count)


@triton.jit
def cast_kernel(blocks_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """Blocks of 34 bytes: an f16 scale and 32 signed bytes."""
    block, at = tl.arange(0, BLOCK), tl.arange(0, 32)
    here = block[:, None] < count
    start = blocks_ptr + block[:, None] * 34
    scale = tl.load(start.to(tl.pointer_type(tl.float16)), mask=here, other=0.0).to(tl.float32)
    codes = tl.load((start + 2 + at[None, :]).to(tl.pointer_type(tl.int8)), mask=here, other=0)
    tl.store(y_ptr + block[:, None] * 32 + at[None, :], codes.to(tl.float32) * scale, mask=here)


@triton.jit
def wide_cast_kernel(x_ptr, y_ptr, at):
    """One 8-byte load out of a tensor of bytes."""
    tl.store(y_ptr, tl.load((x_ptr + at).to(tl.pointer_type(tl.int64))))


@T.core.builtin
def _own_builtin(x, _semantic=None):
    """Not Triton's, but it gets the compiler's hand like Triton's own functions."""
    return x


@triton.jit
def _touched(pointer):
    tl.store(pointer, tl.load(pointer) + 1)
    return pointer


this = sys.modules[__name__]


@triton.jit
def chained_kernel(x_ptr, y_ptr, count):
    _touched(y_ptr + 1).store(this._scalar(x_ptr, count))
    _touched(y_ptr).atomic_add(1.0)


@triton.jit
def names_kernel(x_ptr, y_ptr, count, BLOCK: T.constexpr = 64):
    T.static_print(f"größe {BLOCK}: ", BLOCK)  # ä, ö (and tl.load(x_ptr)) in a comment
    # fmt: off
    "ü"; at = T.arange(0, BLOCK); x = load(x_ptr + at, at < count, 0.0)  # noqa: E702
    y = (
        T.load  # a comment with a ( in it, ß
    )(
        # a comment with a ( in it, größer
        pointer=x_ptr  # trailing )
        + at,
        mask=at < count,
        other=0.0,
    )
    "ü"; (y_ptr + at).store(x + y, mask=at < count)  # noqa: E702
    # fmt: on
    T.store(
        y_ptr + at,
        x + y,
        at < count,
    )  # fmt: skip


@triton.jit
def tuple_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    both = (x_ptr, y_ptr)
    x, y = both
    pair = (both[0] + at, both[1] + at)
    tl.store(
        pair[1], tl.load(pair[0], mask=at < count) + tl.load(x, mask=count > 0), mask=at < count
    )


def make_closure_kernel():
    """A kernel that is defined in a function, with a constant and a helper that live there."""
    factor = tl.constexpr(3)

    @triton.jit
    def _times(pointer, at, inside):
        return tl.load(pointer + at, mask=inside, other=0.0) * factor

    @triton.jit(do_not_specialize=["count"], debug=False)
    def closure_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y_ptr + at, _times(x_ptr, at, at < count), mask=at < count)

    return closure_kernel


def make_default_kernel(block: int):
    """A kernel whose default names something that is gone when the kernel is used."""

    @triton.jit
    def default_kernel(x_ptr, y_ptr, count=(3), BLOCK: tl.constexpr = (block // 2) * 2):
        at = tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)

    return default_kernel


@triton.jit
def one_line_kernel(x_ptr, y_ptr): x_ptr += 1; tl.store(y_ptr, tl.load(x_ptr))  # fmt: skip  # noqa: E702


@triton.jit
def wide_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """The plain form moves 128 bits per instruction on every target."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, count, width, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    rows, columns, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    a_ptrs = a_ptr + rows[:, None] * inner + k[None, :]
    b_ptrs = b_ptr + k[:, None] * width + columns[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        left = k < inner - start
        a = tl.load(a_ptrs, mask=(rows[:, None] < count) & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & (columns[None, :] < width), other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += INNER
        b_ptrs += INNER * width
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    tl.store(c_ptr + rows[:, None] * width + columns[None, :], total, mask=inside)


@triton.jit
def picked_kernel(at_ptr, x_ptr, y_ptr, masked_ptr, A: tl.constexpr, B: tl.constexpr):
    """Each lane reads where it is told, and may be masked."""
    lane = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    picked = x_ptr + tl.load(at_ptr + lane)
    inside = tl.load(masked_ptr + lane) == 0
    tl.store(y_ptr + lane, tl.load(picked, mask=inside, other=7))


@triton.jit
def picked_cube_kernel(at_ptr, x_ptr, y_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    lane = tl.arange(0, A)[:, None, None] * B + tl.arange(0, B)[None, :, None]
    lane = lane * C + tl.arange(0, C)[None, None, :]
    tl.store(y_ptr + lane, tl.load(x_ptr + tl.load(at_ptr + lane)))


# --- what must be refused: (kernel, pointers, words of the reason)


@triton.jit
def pointer_from_memory(table_ptr, y_ptr):
    pointer = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr, tl.load(pointer))


@triton.jit
def perhaps_from_memory(table_ptr, x_ptr, y_ptr, C: tl.constexpr):
    pointer = x_ptr if C else tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr, tl.load(pointer))


@triton.jit
def three_roots(a_ptr, b_ptr, c_ptr, y_ptr, at):
    pointer = tl.where(at > 0, tl.where(at > 1, a_ptr, b_ptr), c_ptr)
    tl.store(y_ptr, tl.load(pointer))


@triton.jit
def polled(x_ptr):
    tl.atomic_poll(x_ptr, 1)


@triton.jit
def boundary_checked(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr, boundary_check=(0,)))


@triton.jit
def block_pointer(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(tl.make_block_ptr(x_ptr, [1], [1], [0], [1], [0])))


@triton.jit
def host_descriptor(x_desc, y_ptr):
    tl.store(y_ptr, tl.sum(x_desc.load([0, 0])))


@triton.jit
def host_gather(x_desc, rows, y_ptr):
    tl.store(y_ptr, tl.sum(x_desc.gather(rows, 0)))


@triton.jit
def unknown_function(x_ptr, y_ptr, FUNCTION: tl.constexpr):
    tl.store(y_ptr, FUNCTION(tl.load(x_ptr)))


@triton.jit
def own_builtin(x_ptr, y_ptr):
    tl.store(y_ptr, _own_builtin(tl.load(x_ptr)))


@triton.jit
def starred(x_ptr, y_ptr):
    arguments = (x_ptr, True)
    tl.store(y_ptr, tl.load(*arguments))


@triton.jit
def renamed(x_ptr, y_ptr):
    read = tl.load
    tl.store(y_ptr, read(x_ptr))


@triton.jit
def assembly(x_ptr, y_ptr):
    tl.store(
        y_ptr,
        tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [x_ptr], tl.int32, False, 1),
    )


@triton.jit
def assembly_of_integer(x_ptr, y_ptr, address):
    tl.store(
        y_ptr,
        tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [address], tl.int32, False, 1),
    )


@triton.jit
def _hidden(a, b):
    return a + tl.load(b.to(tl.pointer_type(tl.float32)))


@triton.jit
def handed_on(x_ptr, y_ptr):
    tl.store(y_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, 4)), 0, _hidden))


@triton.jit
def handed_address(x_ptr, y_ptr):
    tl.store(y_ptr, tl.max(x_ptr.to(tl.int64) + tl.arange(0, 4)))


@triton.jit
def from_integer(address, y_ptr):
    tl.store(y_ptr, _hidden(0.0, address))


@triton.jit
def _around(x_ptr, N: tl.constexpr):
    if N:
        tl.load(x_ptr)
        _around(x_ptr, N - 1)


@triton.jit
def recursive(x_ptr):
    _around(x_ptr, 3)


@triton.jit
def in_text(x_ptr):
    tl.static_print(f"{tl.load(x_ptr)}")


@triton.jit
def not_named(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr))


class _Holder:
    def __init__(self, pointer):
        self.pointer = pointer


@triton.jit
def held(x_ptr, y_ptr):
    holder = _Holder(x_ptr)
    tl.store(y_ptr, tl.load(holder.pointer))


@triton.jit
def reserved(x_ptr, guard__slots):
    tl.store(x_ptr, guard__slots)


@triton.jit
def too_many_by_place(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr, None, None, ()))


REFUSED = [
    (pointer_from_memory, ["table_ptr", "y_ptr"], "cannot tell which parameter `pointer`"),
    (perhaps_from_memory, ["table_ptr", "x_ptr", "y_ptr"], "cannot tell which parameter `pointer`"),
    (three_roots, ["a_ptr", "b_ptr", "c_ptr", "y_ptr"], "more than two"),
    (polled, ["x_ptr"], "might wait for ever" if hasattr(tl, "atomic_poll") else "cannot tell"),
    (boundary_checked, ["x_ptr", "y_ptr"], "boundary_check has no guarded form"),
    (block_pointer, ["x_ptr", "y_ptr"], "cannot tell which parameter"),
    (host_descriptor, ["y_ptr"], "a descriptor from the host?"),
    (host_gather, ["y_ptr"], "write tl.gather"),
    (unknown_function, ["x_ptr", "y_ptr"], "cannot tell which function this calls"),
    (own_builtin, ["x_ptr", "y_ptr"], "cannot look into"),
    (starred, ["x_ptr", "y_ptr"], "starred arguments"),
    (renamed, ["x_ptr", "y_ptr"], "can only be called"),
    (assembly, ["x_ptr", "y_ptr"], "assembly that may touch memory"),
    (assembly_of_integer, ["x_ptr", "y_ptr"], "assembly that may touch memory"),
    (handed_on, ["x_ptr", "y_ptr"], "cannot tell which parameter"),
    (handed_address, ["x_ptr", "y_ptr"], "what max does with a pointer"),
    (from_integer, ["y_ptr"], "cannot tell which parameter"),
    (recursive, ["x_ptr"], "recursion?"),
    (in_text, ["x_ptr"], "f-string"),
    (not_named, ["y_ptr"], "cannot tell which parameter `x_ptr`"),
    (held, ["x_ptr", "y_ptr"], "cannot look into"),
    (reserved, ["x_ptr"], "are the guard's"),
    (too_many_by_place, ["x_ptr", "y_ptr"], "as keywords"),
]
