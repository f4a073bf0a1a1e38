"""Turns rows by their positions, which were made with two bytes each; the kernel reads four.

With `right` they have four.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def turn_rows(x_ptr, positions_ptr, cos_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    position = tl.load(positions_ptr.to(tl.pointer_type(tl.int32)) + row)
    column = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + position * width + column)
    x = tl.load(x_ptr + row * width + column)
    tl.store(x_ptr + row * width + column, x * cos)


def main(right):
    x, cos = torch.ones(8, 64, device=DEVICE), torch.ones(512, 64, device=DEVICE)
    dtype = torch.int32 if right else torch.int16
    positions = torch.arange(100, 108, dtype=dtype, device=DEVICE)
    turn_rows[(8,)](x, positions, cos, 64, BLOCK=64)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["dtype width"]
# kernels = ["turn_rows"]
# arguments = ["positions_ptr"]
# lines = ["tl.pointer_type(tl.int32)"]
# fix = 'width|cast|int32|type|bytes'
# ///
