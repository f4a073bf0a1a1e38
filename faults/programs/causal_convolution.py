"""A convolution over time that looks three steps back, also from the first three.

With `right` what lies before the first step is masked off.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def convolve(x_ptr, w_ptr, out_ptr, length, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(4):
        at = t - tap
        if MASKED:
            x = tl.load(x_ptr + at, mask=(at >= 0) & (at < length), other=0.0)
        else:
            x = tl.load(x_ptr + at, mask=at < length, other=0.0)
        total += x * tl.load(w_ptr + tap)
    tl.store(out_ptr + t, total, mask=t < length)


def main(right):
    x = torch.ones(200, device=DEVICE)
    w, out = torch.full((4,), 0.25, device=DEVICE), torch.zeros(200, device=DEVICE)
    convolve[(4,)](x, w, out, 200, MASKED=right, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["convolve"]
# arguments = ["x_ptr"]
# lines = ["mask=at < length"]
# fix = '>= 0'
# ///
