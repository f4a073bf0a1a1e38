"""Turns pairs of columns in place by tables of cosines and sines."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def turn(x_ptr, positions_ptr, cos_ptr, sin_ptr, num_heads, HALF: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    position, column = tl.load(positions_ptr + token), tl.arange(0, HALF)
    cos = tl.load(cos_ptr + position * HALF + column)
    sin = tl.load(sin_ptr + position * HALF + column)
    at = x_ptr + (token * num_heads + head) * 2 * HALF + column
    low, high = tl.load(at), tl.load(at + HALF)
    tl.store(at, low * cos - high * sin)
    tl.store(at + HALF, high * cos + low * sin)


def main():
    x = torch.randn(9, 4, 64, device=DEVICE)
    before = x.norm().item()
    angles = torch.outer(torch.arange(100.0), 10000 ** (-torch.arange(32) / 32)).to(DEVICE)
    positions = torch.arange(20, 29, dtype=torch.int32, device=DEVICE)
    turn[(9, 4)](x, positions, angles.cos(), angles.sin(), 4, HALF=32)
    print("norm kept", abs(x.norm().item() - before) < 1e-3)


if __name__ == "__main__":
    main()
