"""Adds vectors whose length is no multiple of a block."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    total = tl.load(x_ptr + at, mask=live) + tl.load(y_ptr + at, mask=live)
    tl.store(out_ptr + at, total, mask=live)


def main():
    x, y = torch.randn(98432, device=DEVICE), torch.randn(98432, device=DEVICE)
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 4096),)](x, y, out, x.numel(), BLOCK=4096)
    print("largest error", (out - x - y).abs().max().item())


if __name__ == "__main__":
    main()
