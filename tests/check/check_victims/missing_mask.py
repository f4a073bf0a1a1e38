"""The load has no mask, so the last block reads past the end."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n if MASKED else None)
    y = tl.load(y_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, x + y, mask=offs < n)


def run(faulty):
    n = 1000
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    assert x.is_cuda
    out = torch.empty_like(x)
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, not faulty, BLOCK=256)
    torch.testing.assert_close(out, x + y)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
