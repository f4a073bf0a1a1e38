"""Chooses its split by device, as packages do: where a block has little shared memory, two
programs work on each row, and both store what they have."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl

SHARED = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
SPLIT = 2 if SHARED < 128 * 1024 else 1
WIDE = torch.version.hip is not None


@triton.jit
def sums(x_ptr, y_ptr, columns, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * BLOCK, columns, SPLIT * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + cols, mask=cols < columns, other=0.0)
    tl.store(y_ptr + row, tl.sum(total))


@triton.jit
def last(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


if __name__ == "__main__":
    x, y = torch.ones(5, 200, device="cuda"), torch.zeros(5, device="cuda")
    sums[(5, SPLIT)](x, y, 200, BLOCK=64, SPLIT=SPLIT)
    last[(1,)](torch.zeros(10, device="cuda"), 10, BLOCK=16)
    if WIDE:
        raise NotImplementedError("no AMD GPU yet")
