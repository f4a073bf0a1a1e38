"""Logits without their padding are a view, whose rows a kernel takes to lie close together."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def keep_above(logits_ptr, floor_ptr, vocab, pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    floor = tl.load(floor_ptr + row)
    x = tl.load(logits_ptr + row * pitch + at, mask=at < vocab, other=-float("inf"))
    kept = tl.where(x >= floor, x, -float("inf"))
    tl.store(logits_ptr + row * pitch + at, kept, mask=at < vocab)


def run(faulty):
    logits = torch.randn(3, 64, device="cuda")[:, :50]
    floor = torch.zeros(3, device="cuda")
    keep_above[(3,)](logits, floor, 50, 50 if faulty else logits.stride(0), BLOCK=64)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
