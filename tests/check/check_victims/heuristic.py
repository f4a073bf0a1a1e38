"""A heuristic says EVEN, so the mask is left out, although the length is odd."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl

DIVISOR = [32]


@triton.heuristics({"EVEN": lambda args: args["n"] % DIVISOR[0] == 0})
@triton.jit
def negate(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y_ptr + offs, -tl.load(x_ptr + offs))
    else:
        tl.store(y_ptr + offs, -tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def run(faulty):
    DIVISOR[0] = 1 if faulty else 32
    x = torch.randn(99, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    negate[(4,)](x, y, 99, BLOCK=32)
    assert torch.equal(y, -x)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
