"""Subtracts from each element the one before it; the first has none.

With `right` the first program returns.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def differences(x_ptr, out_ptr, n, FROM: tl.constexpr):
    pid = tl.program_id(0)
    if pid < FROM:
        return
    tl.store(out_ptr + pid, tl.load(x_ptr + pid) - tl.load(x_ptr + pid - 1))


def main(right):
    x = torch.arange(64.0, device=DEVICE)
    out = torch.zeros(64, device=DEVICE)
    differences[(64,)](x, out, 64, FROM=1 if right else 0)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask"]
# kernels = ["differences"]
# arguments = ["x_ptr"]
# lines = ["x_ptr + pid - 1"]
# fix = '>= 0|> 0'
# ///
