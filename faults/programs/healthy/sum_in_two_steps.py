"""A sum in blocks, and a second launch that adds up what they gave."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def block_sums(x_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


@triton.jit
def add_up(partial_ptr, out_ptr, num, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(partial_ptr + at, mask=at < num, other=0.0)))


def main():
    x = torch.ones(5000, device=DEVICE)
    partial, out = torch.empty(20, device=DEVICE), torch.empty(1, device=DEVICE)
    block_sums[(20,)](x, partial, 5000, BLOCK=256)
    add_up[(1,)](partial, out, 20, BLOCK=32)
    print("sum", out.item())


if __name__ == "__main__":
    main()
