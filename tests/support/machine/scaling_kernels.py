"""Kernels: one scales, one is what a wrong compiler would make of it, one turns a tile, one has
scaled products."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def scale_broken(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.where(at == 300, 3, 2)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def copy_listed(table_ptr, out_ptr, BLOCK: tl.constexpr):
    """Each program copies the BLOCK floats whose address stands in a table."""
    at = tl.arange(0, BLOCK)
    source = tl.load(table_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + at, tl.load(source + at))


@triton.jit
def turn(x_ptr, out_ptr, num_rows, SIZE: tl.constexpr):
    """The first rows of a tile's transpose, which goes by way of shared memory."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    turned = tl.trans(tl.load(x_ptr + rows * SIZE + columns))
    tl.store(out_ptr + rows * SIZE + columns, turned, mask=rows < num_rows)


@triton.jit
def scaled_product(
    a, b, of_a, of_b, out,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    IN_A: tl.constexpr, IN_B: tl.constexpr,
):  # fmt: skip
    rows, blocks = tl.arange(0, SIZE), tl.arange(0, DEPTH // 32)
    bytes_a, bytes_b = tl.arange(0, DEPTH // IN_A), tl.arange(0, DEPTH // IN_B)
    left = tl.load(a + rows[:, None] * (DEPTH // IN_A) + bytes_a[None, :])
    right = tl.load(b + bytes_b[:, None] * SIZE + rows[None, :])
    scales = rows[:, None] * (DEPTH // 32) + blocks[None, :]
    product = tl.dot_scaled(left, tl.load(of_a + scales), A, right, tl.load(of_b + scales), B)
    tl.store(out + rows[:, None] * SIZE + rows[None, :], product)
