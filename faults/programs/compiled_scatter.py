"""Values are put into slots under torch.compile; one slot lies behind the cache.

With `right` none does.
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.compile
def write_slots(cache, slots, values):
    doubled = values * 2.0
    return cache.index_put((slots,), doubled)


def main(right):
    cache = torch.zeros(100, 4, device=DEVICE)
    slots = torch.arange(24, device=DEVICE)
    if not right:
        slots[13] = 100
    values = torch.ones(24, 4, device=DEVICE)
    print("sum", write_slots(cache, slots, values).sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["triton_", "cpp_"]
# lines = ["cache.index_put("]
# is_recorded_on_cpu = false
# fix = 'slots inside 0 to 99'
# options = ["--suspect"]
# ///
