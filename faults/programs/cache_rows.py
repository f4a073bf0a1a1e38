"""Copies cached rows by their number; row times stride leaves 32 bits at row 2.

With `right` the row is a 64-bit number.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def copy_row(cache_ptr, out_ptr, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride if WIDE else row * stride
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * BLOCK + column, tl.load(cache_ptr + start + column))


def main(right):
    cache = torch.empty(3 * 2**30 + 64, dtype=torch.int8, device=DEVICE)
    rows = cache.as_strided((4, 64), (2**30, 1))
    rows.fill_(1)
    out = torch.zeros(4, 64, dtype=torch.int8, device=DEVICE)
    copy_row[(4,)](rows, out, rows.stride(0), WIDE=right, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["offset overflow"]
# kernels = ["copy_row"]
# arguments = ["cache_ptr", "stride"]
# lines = ["row * stride"]
# fix = '64|int64'
# ///
