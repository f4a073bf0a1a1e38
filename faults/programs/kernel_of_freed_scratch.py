"""A launch on a side stream still reads scratch that its function has let go.

With `right` the scratch is kept for that stream.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add_scratch(scratch_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(out_ptr + at, mask=at < n)
    tl.store(out_ptr + at, old + tl.load(scratch_ptr + at, mask=at < n), mask=at < n)


def add_later(out, side, right):
    n = out.numel()
    scratch = torch.ones(n, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add_scratch[(n // 1024,)](scratch, out, n, BLOCK=1024)
    if right:
        scratch.record_stream(side)


def main(right):
    out = torch.zeros(1 << 14, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(3):
        add_later(out, side, right)
    torch.cuda.current_stream().wait_stream(side)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["memory reused in flight"]
# kernels = ["add_scratch"]
# arguments = ["scratch_ptr"]
# lines = ["scratch = torch.ones("]
# fix = 'record_stream|wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
