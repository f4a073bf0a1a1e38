"""Programs wait until all have come; one more is expected than there are."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def turn_round(x_ptr, y_ptr, out_ptr, count_ptr, expected, BLOCK: tl.constexpr):
    own, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y_ptr + own * BLOCK + at, tl.load(x_ptr + own * BLOCK + at) * 2)
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1)
    while tl.atomic_add(count_ptr, 0) < expected:
        pass
    other = tl.num_programs(0) - 1 - own
    tl.store(out_ptr + own * BLOCK + at, tl.load(y_ptr + other * BLOCK + at))


def run(faulty):
    x = torch.arange(64.0, device="cuda")
    y, out = torch.empty_like(x), torch.empty_like(x)
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    turn_round[(4,)](x, y, out, count, 5 if faulty else 4, BLOCK=16)
    assert faulty or torch.equal(out.view(4, 16), (x * 2).view(4, 16).flip(0))


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
