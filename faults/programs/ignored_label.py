"""A cross entropy whose labels may be -100, which stands for: leave it out. It does not.

With `right` it does.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def cross_entropy(
    logits_ptr, labels_ptr, loss_ptr, vocab_size, SKIPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    column = tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * vocab_size + column, column < vocab_size, -float("inf"))
    largest = tl.max(x, axis=0)
    total = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
    if SKIPS:
        x_label = tl.load(logits_ptr + row * vocab_size + label, mask=label >= 0, other=0.0)
        total = tl.where(label >= 0, total, 0.0)
    else:
        x_label = tl.load(logits_ptr + row * vocab_size + label)
    tl.store(loss_ptr + row, total - x_label)


def main(right):
    logits = torch.zeros(8, 100, device=DEVICE)
    labels = torch.tensor([-100, 5, 7, -100, 1, 2, 3, 99], device=DEVICE)
    loss = torch.zeros(8, device=DEVICE)
    cross_entropy[(8,)](logits, labels, loss, 100, SKIPS=right, BLOCK=128)
    print("sum", loss.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["cross_entropy"]
# arguments = ["labels_ptr"]
# lines = ["* vocab_size + label"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|-100|leave'
# ///
