"""Fills where a mask says so; the mask is of bytes, and is read four at a time.

With `right` it is of integers.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def fill_where(x_ptr, mask_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(mask_ptr.to(tl.pointer_type(tl.int32)) + at, mask=at < n, other=0)
    tl.store(x_ptr + at, 1.0, mask=(at < n) & (chosen != 0))


def main(right):
    x = torch.zeros(500, device=DEVICE)
    mask = torch.ones(500, dtype=torch.int32 if right else torch.uint8, device=DEVICE)
    fill_where[(4,)](x, mask, 500, BLOCK=128)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["dtype width"]
# kernels = ["fill_where"]
# arguments = ["mask_ptr"]
# lines = ["tl.pointer_type(tl.int32)"]
# fix = 'width|cast|int32|type|bytes'
# ///
