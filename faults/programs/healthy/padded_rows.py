"""Rows with room behind them, which nobody writes and nobody reads."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def copy_padded(x_ptr, out_ptr, width, pitch, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width)
    tl.store(out_ptr + row * pitch + column, x, mask=column < width)


@triton.jit
def sum_padded(x_ptr, out_ptr, width, pitch, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * pitch + column, mask=column < width, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, axis=0))


def main():
    x = torch.ones(8, 40, device=DEVICE)
    padded, out = torch.empty(8, 64, device=DEVICE), torch.empty(8, device=DEVICE)
    copy_padded[(8,)](x, padded, 40, 64, BLOCK=64)
    sum_padded[(8,)](padded, out, 40, 64, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main()
