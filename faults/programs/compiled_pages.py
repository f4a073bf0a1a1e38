"""Pages of a cache are taken by a table of two levels, for batches of any size; one page is none.

With `right` each is.
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.compile(dynamic=True)
def gather_pages(cache, table, which):
    rows = table[which]
    return cache[rows] + 1.0


def main(right):
    cache = torch.zeros(40, 32, device=DEVICE)
    table = torch.arange(40, device=DEVICE)
    for size in (8, 12):
        which = torch.arange(size, device=DEVICE)
        if size == 12 and not right:
            table[9] = 40
        print("sum", gather_pages(cache, table, which).sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["triton_", "cpp_"]
# lines = ["cache[rows] + 1.0"]
# is_recorded_on_cpu = false
# fix = 'inside 0 to 39'
# options = ["--suspect"]
# ///
