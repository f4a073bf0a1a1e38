"""A tail of block pointers: whoever forgets an axis in boundary_check reads the next rows."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl
from triton.language import advance


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    a = tl.make_block_ptr(a_ptr, (M, K), (stride_am, 1), (m, 0), (BM, BK), (1, 0))
    b = tl.make_block_ptr(
        base=b_ptr, shape=(K, N), strides=(stride_bk, 1), offsets=(0, n), block_shape=(BK, BN),
        order=(1, 0),
    )  # fmt: skip
    c = tl.make_block_ptr(c_ptr, (M, N), (stride_cm, 1), (m, n), (BM, BN), (1, 0))
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        a_tile = tl.load(a, boundary_check=AXES, padding_option="zero")
        acc += tl.dot(a_tile, tl.load(b, boundary_check=(0, 1)))
        a = advance(a, (0, BK))
        b = b.advance([BK, 0])
    tl.store(c, acc.to(c.dtype.element_ty), boundary_check=(0, 1))


def run(faulty):
    a, b = torch.randn(50, 40, device="cuda"), torch.randn(40, 30, device="cuda")
    c = torch.empty(50, 30, device="cuda")
    axes = (1,) if faulty else (0, 1)
    product[(4, 2)](a, b, c, 50, 30, 40, 40, 30, 30, BM=16, BN=16, BK=16, AXES=axes)
    assert faulty or torch.allclose(c, a @ b, atol=1e-4)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
