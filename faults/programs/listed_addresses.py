"""Addresses of vectors stand in a tensor; the memory of one was given back to the driver.

With `right` all are kept.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_listed(list_ptr, out_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(COUNT):
        pointer = tl.load(list_ptr + number).to(tl.pointer_type(tl.float32))
        total += tl.load(pointer + at)
    tl.store(out_ptr + at, total)


def main(right):
    vectors = [torch.ones(1 << 24, device=DEVICE) for _ in range(4)]
    addresses = torch.tensor([v.data_ptr() for v in vectors], device=DEVICE)
    out = torch.zeros(1024, device=DEVICE)
    if not right:
        vectors.pop(2)
        torch.cuda.empty_cache()
    add_listed[(8,)](addresses, out, COUNT=4, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wild pointer", "use after free"]
# kernels = ["add_listed"]
# arguments = ["list_ptr"]
# lines = ["tl.load(pointer"]
# fix = 'keep|alive|free|address|pointer|entry'
# needs_gpu = true
# ///
