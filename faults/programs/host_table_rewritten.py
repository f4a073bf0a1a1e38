"""A kernel reads a pinned table of the host by itself; the next one is written before it has.

With `right` the host waits for the kernel first.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def gather_scales(out_ptr, table_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(table_ptr + at % 256)
    tl.store(out_ptr + at, scale, mask=at < n)


def main(right):
    table = torch.zeros(256, pin_memory=True)
    out = torch.empty(4, 1 << 16, device="cuda")
    for step in range(4):
        table.fill_(step + 1.0)
        gather_scales[(64,)](out[step], table, 1 << 16, BLOCK=1024)
        if right:
            torch.cuda.current_stream().synchronize()
    print("means", out.mean(1).tolist())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer rewritten in flight"]
# kernels = ["gather_scales"]
# arguments = ["table_ptr"]
# lines = ["table.fill_(step + 1.0)"]
# fix = 'synchronize|wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
