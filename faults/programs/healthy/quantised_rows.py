"""Rows to eight bits with a scale each, and back."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def quantise(x_ptr, codes_ptr, scales_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=0.0)
    scale = tl.max(tl.abs(x), axis=0) / 127 + 1e-9
    codes = (x / scale + 128.5).to(tl.int32) - 128
    tl.store(codes_ptr + row * width + column, codes.to(tl.int8), mask=column < width)
    tl.store(scales_ptr + row, scale)


@triton.jit
def restore(codes_ptr, scales_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * width + column, mask=column < width, other=0)
    scale = tl.load(scales_ptr + row)
    tl.store(out_ptr + row * width + column, codes.to(tl.float32) * scale, mask=column < width)


def main():
    x = torch.randn(14, 90, device=DEVICE)
    codes = torch.empty(14, 90, dtype=torch.int8, device=DEVICE)
    scales, out = torch.empty(14, device=DEVICE), torch.empty_like(x)
    quantise[(14,)](x, codes, scales, 90, BLOCK=128)
    restore[(14,)](codes, scales, out, 90, BLOCK=128)
    print("is close", bool((x - out).abs().max() < 0.05))


if __name__ == "__main__":
    main()
