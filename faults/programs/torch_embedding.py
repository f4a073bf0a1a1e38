"""torch's own embedding with a token that its table has no row for.

With `right` it has.
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(right):
    table = torch.nn.Embedding(100, 32, device=DEVICE)
    ids = torch.arange(64, device=DEVICE)
    if not right:
        ids[9] = 100
    out = table(ids)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["assertion of a kernel", "index out of range"]
# arguments = ["index"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0'
# options = []
# needs_gpu = true
# ///
