"""The backward half of a function under torch.compile: an index changes between the two halves.

With `right` it stays.
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.compile
def look_up(table, ids):
    return table[ids] * 3.0


def main(right):
    table = torch.ones(64, 4, device=DEVICE, requires_grad=True)
    ids = torch.arange(48, device=DEVICE)
    out = look_up(table, ids)
    if not right:
        ids.data[11] = 64
    out.sum().backward()
    print("sum", table.grad.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["triton_", "cpp_"]
# lines = ["return table[ids] * 3.0"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0'
# options = ["--suspect"]
# needs_gpu = true
# ///
