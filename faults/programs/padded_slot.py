"""Writes keys into their slots of a cache; a padded token has slot -1.

With `right` programs of padded tokens end.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def write_keys(k_ptr, slots_ptr, cache_ptr, width, SKIPS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    if SKIPS:
        if slot < 0:
            return
    column = tl.arange(0, BLOCK)
    k = tl.load(k_ptr + token * width + column)
    tl.store(cache_ptr + slot * width + column, k)


def main(right):
    k = torch.ones(6, 64, device=DEVICE)
    cache = torch.zeros(32, 64, device=DEVICE)
    slots = torch.tensor([4, 5, 6, 7, -1, -1], dtype=torch.int32, device=DEVICE)
    write_keys[(6,)](k, slots, cache, 64, SKIPS=right, BLOCK=64)
    print("sum", cache.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["write_keys"]
# arguments = ["slots_ptr"]
# lines = ["tl.store(cache_ptr"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|-1'
# ///
