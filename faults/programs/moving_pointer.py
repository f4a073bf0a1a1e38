"""Walks a column in steps; what is added to the pointer at once leaves 32 bits.

With `right` each step is small.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def walk(x_ptr, out_ptr, stride, step_rows, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(x_ptr + step * step_rows * stride + column).to(tl.int32)
    tl.store(out_ptr + column, total)


def main(right):
    step_rows = 16 if right else 550000
    x = torch.empty(1200000 * 2048, dtype=torch.int8, device=DEVICE).view(1200000, 2048)
    x[: 2 * step_rows + 1 : step_rows] = 1
    out = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    walk[(1,)](x, out, x.stride(0), step_rows, STEPS=3, BLOCK=32)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["offset overflow"]
# kernels = ["walk"]
# arguments = ["x_ptr"]
# lines = ["step * step_rows * stride"]
# fix = '64|int64'
# ///
