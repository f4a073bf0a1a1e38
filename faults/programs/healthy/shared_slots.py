"""Scatters the first rows of each request; slots of padded rows are -1, and left out."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scatter(x_ptr, slots_ptr, cache_ptr, width, BLOCK: tl.constexpr):
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        x = tl.load(x_ptr + token * width + column, mask=column < width)
        tl.store(cache_ptr + slot * width + column, x, mask=column < width)


def main():
    x, cache = torch.ones(10, 48, device=DEVICE), torch.zeros(64, 48, device=DEVICE)
    slots = torch.tensor([4, 9, 33, 63, 0, 1, 2, -1, -1, -1], dtype=torch.int32, device=DEVICE)
    scatter[(10,)](x, slots, cache, 48, BLOCK=64)
    print("sum", cache.sum().item())


if __name__ == "__main__":
    main()
