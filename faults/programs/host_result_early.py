"""A kernel counts into pinned memory of the host by itself; the host reads it before it has.

With `right` the host waits for the kernel first.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def note_largest(found_ptr, x_ptr, step, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=-float("inf"))
    tl.store(found_ptr + step, tl.max(x, axis=0))


def main(right):
    x = torch.randn(4096, device="cuda")
    found = torch.zeros(4, pin_memory=True)
    total = 0.0
    for step in range(4):
        note_largest[(1,)](found, x * step, step, 4096, BLOCK=4096)
        if right:
            torch.cuda.current_stream().synchronize()
        total += found[step].item()
    print("total", total)


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer read in flight"]
# kernels = ["note_largest"]
# arguments = ["found_ptr"]
# lines = ["total += found[step].item()"]
# fix = 'synchronize|wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
