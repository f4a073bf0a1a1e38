"""Counts into bins with atomics, and routes tokens to where their expert's begin."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def count(experts_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + at, mask=at < n, other=0)
    tl.atomic_add(counts_ptr + expert, 1, mask=at < n)


@triton.jit
def place(experts_ptr, next_ptr, order_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + at, mask=at < n, other=0)
    slot = tl.atomic_add(next_ptr + expert, 1, mask=at < n)
    tl.store(order_ptr + slot, at, mask=at < n)


def main():
    experts = (torch.arange(300, device=DEVICE) * 7 % 12).int()
    counts = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    order = torch.empty(300, dtype=torch.int32, device=DEVICE)
    count[(3,)](experts, counts, 300, BLOCK=128)
    starts = (counts.cumsum(0) - counts).int()
    place[(3,)](experts, starts, order, 300, BLOCK=128)
    print("sum", order.sum().item())


if __name__ == "__main__":
    main()
