"""Adds two vectors; with `tail` the store forgets the mask. Knows nothing of hypocenter."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    y = tl.load(y_ptr + offsets, mask=offsets < n)
    if MASKED:
        tl.store(out_ptr + offsets, x + y, mask=offsets < n)
    else:
        tl.store(out_ptr + offsets, x + y)


def main(masked: bool, device: str) -> None:
    n = 1000
    # Behind `out` there is room that is not its own, so that the interpreter survives.
    memory = np.zeros(4096, np.float32)
    x, y = torch.ones(n, device=device), torch.ones(n, device=device)
    out = torch.from_numpy(memory[:n]).to(device)
    for _ in range(2):
        add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
            x, y, out, n, BLOCK=256, MASKED=masked
        )
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("tail" not in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
