"""A program takes a lock and ends without giving it back; the next one waits.

With `right` it gives it back.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_locked(lock_ptr, total_ptr, RELEASES: tl.constexpr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 1)
    if RELEASES:
        tl.atomic_xchg(lock_ptr, 0)


def main(right):
    lock = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    total = torch.zeros(1, device=DEVICE)
    add_locked[(8,)](lock, total, RELEASES=right)
    print("sum", total.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["endless loop"]
# kernels = ["add_locked"]
# lines = ["while"]
# fix = 'lock|release|end|loop|while'
# options = ["--deadline", "15"]
# ///
