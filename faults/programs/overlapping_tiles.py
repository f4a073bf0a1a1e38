"""Marks windows of 96 elements every 64: neighbours store different numbers into what they share.

With `right` a window is as wide as its step.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def number_windows(out_ptr, n, STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    inside = tl.arange(0, BLOCK)
    at = tl.program_id(0) * STEP + inside
    tl.store(out_ptr + at, tl.program_id(0), mask=(inside < WIDTH) & (at < n))


def main(right):
    out = torch.zeros(640, dtype=torch.int32, device=DEVICE)
    number_windows[(10,)](out, 640, STEP=64, WIDTH=64 if right else 96, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["number_windows"]
# arguments = ["out_ptr"]
# lines = ["tl.store"]
# fix = 'one program|STEP|WIDTH|atomic|window'
# options = ["--suspect"]
# ///
