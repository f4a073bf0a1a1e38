"""Positions allocated with 2 bytes each, read with 4: the fault that looked like a bad copy."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def rotate(x_ptr, position_ptr, y_ptr, HALF: tl.constexpr):
    token, lane = tl.program_id(0), tl.arange(0, HALF)
    position = tl.load(position_ptr.to(tl.pointer_type(tl.int32)) + token)
    angle = position * tl.exp(lane * (-9.21 / HALF))
    a = tl.load(x_ptr + token * HALF * 2 + lane)
    b = tl.load(x_ptr + token * HALF * 2 + HALF + lane)
    tl.store(y_ptr + token * HALF * 2 + lane, a * tl.cos(angle) - b * tl.sin(angle))
    tl.store(y_ptr + token * HALF * 2 + HALF + lane, b * tl.cos(angle) + a * tl.sin(angle))


def run(faulty):
    x = torch.randn(6, 32, device="cuda")
    position = torch.arange(6, dtype=torch.int16 if faulty else torch.int32, device="cuda")
    y = torch.empty_like(x)
    rotate[(6,)](x, position, y, HALF=16)
    y.clone()


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
