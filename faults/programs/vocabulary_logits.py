"""Takes the logit of each label; the row of a large batch times the vocabulary leaves 32 bits.

With `right` the batch is small.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def pick_logit(logits_ptr, labels_ptr, out_ptr, vocab_size):
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    tl.store(out_ptr + row, tl.load(logits_ptr + row * vocab_size + label))


def main(right):
    num_rows, vocab_size = (64 if right else 16400), 152064
    logits = torch.empty(num_rows, vocab_size, dtype=torch.int8, device=DEVICE)
    labels = torch.arange(num_rows, dtype=torch.int32, device=DEVICE) % 1000
    logits[:, :1000] = 2
    out = torch.zeros(num_rows, dtype=torch.int8, device=DEVICE)
    pick_logit[(num_rows,)](logits, labels, out, vocab_size)
    print("sum", out.int().sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["offset overflow"]
# kernels = ["pick_logit"]
# arguments = ["logits_ptr"]
# lines = ["row * vocab_size"]
# fix = '64|int64'
# ///
