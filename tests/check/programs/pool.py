"""Rows go into the slots of a pool, as keys into a cache; the pool was never filled."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
import torch
import triton
import triton.language as tl


@triton.jit
def _put(pool_ptr, slot, values, D: tl.constexpr):
    tl.store(pool_ptr + slot * D + tl.arange(0, D), values)


@triton.jit
def write_rows(x_ptr, pool_ptr, slots_ptr, D: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    _put(pool_ptr, slot, tl.load(x_ptr + row * D + tl.arange(0, D)), D)


@triton.jit
def write_first(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def main():
    x = torch.randn(3, 16, device="cuda")
    slots = torch.tensor([5, 2, 7], device="cuda")
    pool = torch.empty(10, 16, device="cuda")
    write_rows[(3,)](x, pool, slots, D=16)  # right
    assert torch.equal(pool[slots], x)
    assert torch.equal(torch.nn.functional.embedding(slots, pool), x)
    picked = torch.empty(10, 16, device="cuda")
    write_rows[(3,)](x, picked, slots, D=16)  # slot 6 is read
    picked[torch.tensor([5, 6], device="cuda")].sum()
    whole = torch.empty(10, 16, device="cuda")
    write_rows[(3,)](x, whole, slots, D=16)  # all is read
    whole.sum()
    short = torch.empty(64, device="cuda")
    write_first[(1,)](x, short, 48, BLOCK=64)  # no scatter


if __name__ == "__main__":
    main()
