"""Scales rows; the scales were stored as halves, and are read as floats.

With `right` they are floats.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale_rows(x_ptr, scales_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    scale = tl.load(scales_ptr.to(tl.pointer_type(tl.float32)) + row)
    at = row * width + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * scale)


def main(right):
    x = torch.ones(32, 16, device=DEVICE)
    scales = torch.ones(32, dtype=torch.float32 if right else torch.float16, device=DEVICE)
    scale_rows[(32,)](x, scales, 16, BLOCK=16)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["dtype width"]
# kernels = ["scale_rows"]
# arguments = ["scales_ptr"]
# lines = ["tl.pointer_type(tl.float32)"]
# fix = 'width|cast|float32|type|bytes'
# ///
