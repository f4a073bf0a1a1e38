"""Draws the largest logit of a row; a padded vocabulary lies behind the real one, and may win.

With `right` the row that is looked up has the padded width.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def largest_logit(logits_ptr, width, names_ptr, out_ptr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * width + column, mask=column < width, other=-float("inf"))
    token = tl.argmax(x, axis=0)
    tl.store(out_ptr + row, tl.load(names_ptr + token))


def main(right):
    logits = torch.zeros(5, 256, device=DEVICE)
    logits[3, 250] = 9.0
    names = torch.ones(256 if right else 240, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    largest_logit[(5,)](logits, 256, names, out, BLOCK=256)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["largest_logit"]
# arguments = ["logits_ptr"]
# lines = ["tl.load(names_ptr"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|logit|larger|names'
# ///
