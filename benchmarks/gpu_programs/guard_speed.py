"""Kernels as people write them, with arguments that keep a GPU busy: what a guard costs each.

`cases` makes them; `benchmarks/gpu_guard.py` times them plain and guarded. Knows nothing of
hypocenter.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    tl.store(out_ptr + at, x + tl.load(y_ptr + at, mask=inside), mask=inside)


@triton.jit
def softmax(x_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=-float("inf"))
    raised = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * stride + columns, raised / tl.sum(raised, axis=0), mask=inside)


@triton.jit
def layer_norm(x_ptr, weight_ptr, bias_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * width
    out_ptr += row * width
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        total += x
        squares += x * x
    mean = tl.sum(total) / width
    scale = tl.rsqrt(tl.sum(squares) / width - mean * mean + 1e-5)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=inside)
        bias = tl.load(bias_ptr + at, mask=inside)
        tl.store(out_ptr + at, (x - mean) * scale * weight + bias, mask=inside)


@triton.jit
def gather(ids_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    index = tl.load(ids_ptr + token)
    columns = tl.arange(0, BLOCK)
    row = tl.load(table_ptr + index * width + columns, mask=columns < width)
    tl.store(out_ptr + token * width + columns, row, mask=columns < width)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_a + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] * stride_b + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = inner < K - start
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_b
    c_ptrs = c_ptr + rows[:, None] * stride_c + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptrs, total.to(tl.float16), mask=inside)


def cases(device, scale=1):
    """(kernel, grid, arguments by name, options) of each; `scale` divides the sizes."""
    n = (1 << 26) // scale
    x, y = torch.randn(n, device=device), torch.randn(n, device=device)
    yield (
        add, (triton.cdiv(n, 1024),),
        {"x_ptr": x, "y_ptr": y, "out_ptr": torch.empty_like(x), "n": n}, {"BLOCK": 1024},
    )  # fmt: skip
    rows, width = 32768 // scale, 1000
    x = torch.randn(rows, width, device=device)
    yield (
        softmax, (rows,),
        {"x_ptr": x, "out_ptr": torch.empty_like(x), "stride": width, "width": width},
        {"BLOCK": 1024},
    )  # fmt: skip
    width = 4096
    x = torch.randn(8192 // scale, width, device=device, dtype=torch.float16)
    weight, bias = (torch.randn(width, device=device, dtype=torch.float16) for _ in range(2))
    yield (
        layer_norm, (x.shape[0],),
        {"x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "out_ptr": torch.empty_like(x),
         "width": width},
        {"BLOCK": 1024},
    )  # fmt: skip
    table = torch.randn(65536 // scale, 128, device=device, dtype=torch.float16)
    ids = torch.randint(0, table.shape[0], ((1 << 19) // scale,), device=device)
    out = torch.empty(ids.shape[0], 128, device=device, dtype=torch.float16)
    yield (
        gather, (ids.shape[0],),
        {"ids_ptr": ids, "table_ptr": table, "out_ptr": out, "width": 128}, {"BLOCK": 128},
    )  # fmt: skip
    size = 4096 // scale
    a, b = (torch.randn(size, size, device=device, dtype=torch.float16) for _ in range(2))
    tiles = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32}
    strides = {"stride_a": size, "stride_b": size, "stride_c": size}
    yield (
        matmul, (triton.cdiv(size, 128), triton.cdiv(size, 128)),
        {"a_ptr": a, "b_ptr": b, "c_ptr": torch.empty_like(a), "M": size, "N": size, "K": size,
         **strides},
        {**tiles, "num_warps": 8},
    )  # fmt: skip
