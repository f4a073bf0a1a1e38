"""Promises that a stride is a multiple of 16; it is 20, and 16 bytes are loaded at once.

With `right` it is a multiple of 16.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_hinted(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * tl.multiple_of(stride, 16) + tl.arange(0, BLOCK)
    tl.store(out_ptr + row, tl.sum(tl.load(x_ptr + at), axis=0))


def main(right):
    pitch = 32 if right else 18
    x = torch.ones(9 * pitch + 32, device=DEVICE)
    out = torch.zeros(9, device=DEVICE)
    sum_hinted[(9,)](x.as_strided((9, 16), (pitch, 1)), out, pitch, BLOCK=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["misalignment"]
# kernels = ["sum_hinted"]
# lines = ["tl.multiple_of"]
# fix = 'hint|multiple|align|stride|pitch'
# options = ["--suspect"]
# ///
