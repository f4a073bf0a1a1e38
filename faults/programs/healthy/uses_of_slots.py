"""Counts uses of cache slots without an atomic: no slot stands twice in a batch."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def count_uses(slots_ptr, uses_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + at, mask=at < n, other=0)
    uses = tl.load(uses_ptr + slot, mask=at < n, other=0)
    tl.store(uses_ptr + slot, uses + 1, mask=at < n)


torch.manual_seed(0)
uses = torch.zeros(64, dtype=torch.int32, device=DEVICE)
for _ in range(3):
    slots = torch.randperm(64, device=DEVICE)[:20].int()
    count_uses[(1,)](slots, uses, 20, BLOCK=32)
assert uses.sum() == 60
