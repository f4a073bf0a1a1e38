"""Marks which tokens occur: several lanes raise one flag, and all of them to the same value."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def mark(ids_ptr, seen_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + at, mask=at < n, other=0)
    flags = tl.load(seen_ptr + token, mask=at < n, other=0)
    tl.store(seen_ptr + token, flags | 1, mask=at < n)


torch.manual_seed(0)
ids = torch.randint(0, 20, (30,), dtype=torch.int32, device=DEVICE)
seen = torch.zeros(20, dtype=torch.int32, device=DEVICE)
mark[(1,)](ids, seen, 30, BLOCK=32)
assert seen.sum() == len(ids.unique())
