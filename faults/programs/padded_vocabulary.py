"""Clears the logits below a floor, of a view without the padding of the vocabulary.

The kernel takes the rows to lie close together; with `right` it is given their pitch.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def clear_low(logits_ptr, floor_ptr, vocab, pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    floor = tl.load(floor_ptr + row)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * pitch + at, mask=at < vocab, other=-float("inf"))
        tl.store(logits_ptr + row * pitch + at, tl.where(x >= floor, x, 0.0), mask=at < vocab)


def main(right):
    logits = torch.ones(6, 160, device=DEVICE)[:, :151]
    floor = torch.zeros(6, device=DEVICE)
    clear_low[(6,)](logits, floor, 151, logits.stride(0) if right else 151, BLOCK=64)
    print("sum", logits.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong stride"]
# kernels = ["clear_low"]
# arguments = ["logits_ptr", "pitch"]
# lines = ["logits_ptr + row * pitch"]
# fix = 'stride|pitch|packed'
# options = ["--suspect"]
# ///
