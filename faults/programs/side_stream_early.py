"""A side stream scales what the default stream has just been asked to fill.

With `right` it waits for that.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def fill(x_ptr, n, value, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, value, mask=at < n)


@triton.jit
def scale_filled(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


def main(right):
    n = 1 << 14
    x = torch.zeros(n, device="cuda")
    y = torch.zeros(n, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        fill[(n // 1024,)](x, n, 1.0, BLOCK=1024)
        if right:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scale_filled[(n // 1024,)](x, y, n, BLOCK=1024)
        torch.cuda.synchronize()
    print("mean", y.mean().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# kernels = ["scale_filled"]
# arguments = ["x_ptr"]
# lines = ["scale_filled["]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
