"""Kernels that use the language as its compiler takes it: loops, and functions of libdevice."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _row(i, stride):
    return i.to(tl.int64) * stride


@triton.jit
def sums_of_rows(x_ptr, y_ptr, rows, stride, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Every STEP-th row; what a loop counts by is cast, as in compiled Triton."""
    cols = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in range(0, rows, STEP):
        total += tl.load(x_ptr + _row(i, stride) + cols)
    for k in tl.range(rows - 1, -1, -1, num_stages=2):
        total += tl.load(x_ptr + k.to(tl.int64) * stride + cols) * 0
    for j in tl.static_range(2):
        total += j * 0
    tl.store(y_ptr + cols, total)


@triton.jit
def types_of_counters(y_ptr, n):
    for i in range(n):
        tl.static_assert(i.dtype == tl.int32)
    for i in range(n.to(tl.int64)):
        tl.static_assert(i.dtype == tl.int64)
    for i in range(0, 4, n):
        tl.static_assert(i.dtype == tl.int32)
        tl.store(y_ptr + i, i)


@triton.jit
def far_row(x_ptr, first, stride):
    """A counter times a stride, in 32 bits: it wraps back to where the tensor is."""
    for i in range(first, first + 1):
        tl.store(x_ptr + i * stride, 1.0)


@triton.jit
def float_bound(x_ptr, n):
    for i in range(n / 2):
        tl.store(x_ptr + i, 1.0)


@triton.jit
def powers(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    """Powers of whole numbers, the bits of whole numbers, and how a float lies in memory."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    n = tl.load(z_ptr + i)
    tl.store(y_ptr + i, libdevice.pow(x, n))
    tl.store(y_ptr + N + i, libdevice.pow(2.0, n))
    tl.store(y_ptr + 2 * N + i, libdevice.abs(n) / 2)
    bits = libdevice.popc(n) + 100 * libdevice.clz(n) + 10_000 * libdevice.ffs(n)
    tl.static_assert(bits.dtype == tl.int32)
    tl.store(y_ptr + 3 * N + i, bits)
    same = libdevice.int_as_float(libdevice.float_as_int(x))
    tl.store(y_ptr + 4 * N + i, tl.where(libdevice.isnan(same), 1.0, same))
    tl.static_assert(libdevice.isnan(x).dtype == tl.int1)
    tl.static_assert(libdevice.llrint(x).dtype == tl.int64)


@triton.jit
def root_of_integers(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, libdevice.sqrt(i))


@triton.jit
def root_of_halves(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, libdevice.fmod(tl.load(x_ptr + i).to(tl.float16), 2.0))


@triton.jit
def copy_rows(x_ptr, y_ptr, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Its load has a mask and no `other`, in two dimensions."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + r[:, None] * COLUMNS + c[None, :], mask=(r < rows)[:, None])
    tl.store(y_ptr + r[:, None] * COLUMNS + c[None, :], x, mask=(r < rows)[:, None])
