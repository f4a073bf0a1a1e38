"""A lookup whose table was left on the CPU.

With `right` it is where the rest is.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def lookup(ids_ptr, table_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, tl.load(table_ptr + ids, mask=at < n), mask=at < n)


def main(right):
    table = torch.ones(50, device=DEVICE if right else "cpu")
    ids = torch.arange(50, device=DEVICE)
    out = torch.zeros(50, device=DEVICE)
    lookup[(1,)](ids, table, out, 50, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["host pointer"]
# kernels = ["lookup"]
# arguments = ["table_ptr"]
# fix = 'device|cuda|GPU'
# options = []
# needs_gpu = true
# ///
