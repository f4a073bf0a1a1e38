"""Kernels with block pointers, as people wrote them before tensor descriptors."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl
from triton.language import load, make_block_ptr
from triton.language.core import advance


@triton.jit
def copy_tile(
    x_ptr, y_ptr, M, N, stride_m, row, column,
    BM: tl.constexpr, BN: tl.constexpr, PADDING: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """One tile at (row, column), what is outside of it included."""
    x = tl.make_block_ptr(x_ptr, (M, N), (stride_m, 1), (row, column), (BM, BN), (1, 0))
    y = tl.make_block_ptr(y_ptr, (BM, BN), (BN, 1), (0, 0), (BM, BN), (1, 0))
    tl.store(y, tl.load(x, boundary_check=AXES, padding_option=PADDING))


@triton.jit
def _moved(block, by):
    return advance(block, (by,))


@triton.jit
def sum_of_parts(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Named imports, an inner function, and a scalar that is stored to a whole block."""
    x = make_block_ptr(x_ptr, n, 1, 0, BLOCK, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(tl.cdiv(n, BLOCK)):
        total += load(x, boundary_check=(0,), padding_option="zero")
        x = _moved(x, BLOCK)
    y = make_block_ptr(y_ptr, (BLOCK,), (1,), (0,), (BLOCK,), (0,))
    tl.store(y, tl.sum(total))


@triton.jit
def far_tile(x_ptr, n, stride, row, BLOCK: tl.constexpr):
    """The offset is computed in 32 bits, and leaves them."""
    x = tl.make_block_ptr(x_ptr, (n,), (1,), (row * stride,), (BLOCK,), (0,))
    tl.store(x, 1.0, boundary_check=(0,))


@triton.jit
def masked(x_ptr, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (BLOCK,), (1,), (0,), (BLOCK,), (0,))
    tl.store(x, 1.0, mask=tl.arange(0, BLOCK) < 2)


@triton.jit
def half_stored(x_ptr, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (BLOCK,), (1,), (0,), (BLOCK,), (0,))
    tl.store(x, tl.zeros((BLOCK,), tl.float16))


@triton.jit
def checked_pointers(x_ptr, BLOCK: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, BLOCK), boundary_check=(0,))
