"""Gates two halves of a row; the output was made half as wide as what is stored.

With `right` it is as wide.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def gate_halves(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    live = column < width
    a = tl.load(x_ptr + row * 2 * width + column, mask=live)
    b = tl.load(x_ptr + row * 2 * width + width + column, mask=live)
    tl.store(out_ptr + row * width + column, a * tl.sigmoid(a) * b, mask=live)


def main(right):
    x = torch.ones(10, 256, device=DEVICE)
    out = torch.zeros(10, 128 if right else 64, device=DEVICE)
    gate_halves[(10,)](x, out, 128, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer too small", "scalar out of range", "missing tail mask"]
# kernels = ["gate_halves"]
# arguments = ["out_ptr", "width"]
# lines = ["tl.store(out_ptr"]
# fix = 'larger|wide|width|room|128|64'
# never = 'stride'
# undecided = """
# Each of 1,280 elements is stored once, and 640 have room. Nothing recorded says whether the output
# is to have 128 columns or the kernel is to store 64 of them."""
# ///
