"""RMSNorm whose weight is shorter than the rows."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
from triton.language import arange, constexpr, load, program_id, rsqrt, store
from triton.language import sum as total


@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, stride, num_cols, eps, BLOCK: constexpr):
    row = program_id(0)
    cols = arange(0, BLOCK)
    mask = cols < num_cols
    x = load(x_ptr + row * stride + cols, mask=mask, other=0.0)
    scale = rsqrt(total(x * x, 0) / num_cols + eps)
    w = load(w_ptr + cols, mask=mask, other=0.0)
    store(y_ptr + row * stride + cols, x * scale * w, mask=mask)


def run(faulty):
    with torch.device("cuda"):
        x, w = torch.randn(6, 1000), torch.randn(900 if faulty else 1000)
    y = torch.empty_like(x)
    rms_norm[(6,)](x, w, y, x.stride(0), 1000, 1e-6, BLOCK=1024, num_warps=8)
    if not faulty:
        wanted = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
