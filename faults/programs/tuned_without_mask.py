"""One of two configurations takes blocks that do not come out even, and the kernel has no mask.

With `right` both come out even.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def square(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x * x)


def main(right):
    n = 1024 if right else 960
    x, out = torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    square[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["square"]
# arguments = ["x_ptr", "out_ptr"]
# lines = ["tl.load(x_ptr + at)"]
# fix = 'mask|grid|< n'
# needs_gpu = true
# ///
