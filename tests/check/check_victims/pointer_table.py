"""Loads the addresses of its inputs from a table, one of which is null."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def gather(table_ptr, y_ptr, n, BLOCK: tl.constexpr):
    which, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x_ptr = tl.load(table_ptr + which).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + which * n + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def run(faulty):
    parts = [torch.randn(20, device="cuda") for _ in range(3)]
    addresses = [part.data_ptr() for part in parts]
    if faulty:
        addresses[1] = 0
    table = torch.tensor(addresses, dtype=torch.int64, device="cuda")
    y = torch.empty(3, 20, device="cuda")
    gather[(3,)](table, y, 20, BLOCK=32)
    assert faulty or torch.equal(y, torch.stack(parts))


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
