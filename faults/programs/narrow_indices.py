"""Gathers by indices of four bytes; the kernel reads eight.

With `right` they have eight.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def gather_wide(ids_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr.to(tl.pointer_type(tl.int64)) + at, mask=at < n, other=0)
    tl.store(out_ptr + at, tl.load(x_ptr + ids, mask=at < n), mask=at < n)


def main(right):
    x, out = torch.ones(100, device=DEVICE), torch.zeros(60, device=DEVICE)
    ids = torch.arange(60, device=DEVICE)
    if not right:
        ids = ids.int()
    gather_wide[(1,)](ids, x, out, 60, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["dtype width"]
# kernels = ["gather_wide"]
# arguments = ["ids_ptr"]
# lines = ["tl.pointer_type(tl.int64)"]
# fix = 'width|cast|int64|type|bytes'
# ///
