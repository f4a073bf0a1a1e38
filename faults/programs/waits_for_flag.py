"""A consumer waits for a flag that its producer sets only if it has work.

With `right` it has.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def produce(flag_ptr, n):
    if n > 0:
        tl.atomic_xchg(flag_ptr, 1)


@triton.jit
def consume(flag_ptr, out_ptr):
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass
    tl.store(out_ptr, 1.0)


def main(right):
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, device=DEVICE)
    produce[(1,)](flag, 5 if right else 0)
    consume[(1,)](flag, out)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["endless loop"]
# kernels = ["consume"]
# lines = ["while"]
# fix = 'flag|end|loop|while|wait'
# options = ["--deadline", "15"]
# ///
