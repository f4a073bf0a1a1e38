"""Unpacks four-bit codes, two to a byte; a block of an odd tail reads one byte too many.

With `right` bytes are masked by their own number.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def unpack(codes_ptr, scales_ptr, out_ptr, n, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = at // 2 if RIGHT else at // 2 + 1
    code = tl.load(codes_ptr + byte, mask=at < n, other=0)
    nibble = tl.where(at % 2 == 0, code & 15, code >> 4)
    scale = tl.load(scales_ptr + at // 32, mask=at < n, other=0.0)
    tl.store(out_ptr + at, (nibble.to(tl.float32) - 8) * scale, mask=at < n)


def main(right):
    n = 1000
    codes = torch.full((n // 2,), 0x99, dtype=torch.uint8, device=DEVICE)
    scales = torch.ones(triton.cdiv(n, 32), device=DEVICE)
    out = torch.zeros(n, device=DEVICE)
    unpack[(4,)](codes, scales, out, n, RIGHT=right, BLOCK=256)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["unpack"]
# arguments = ["codes_ptr", "n"]
# lines = ["tl.load(codes_ptr"]
# fix = 'mask|<|earlier'
# ///
