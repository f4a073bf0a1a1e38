"""A compiled function whose index leads far out of its tensor.

With `right` it lies inside.
"""

import sys

import torch
import torch._inductor.config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


torch._inductor.config.assert_indirect_indexing = False


@torch.compile
def look_up(x, ids):
    return x[ids] * 2 + 1


def main(right):
    x = torch.ones(1000, 64, device=DEVICE)
    ids = torch.arange(512, device=DEVICE)
    if not right:
        ids[300] = 1 << 36
    print("sum", look_up(x, ids).sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range"]
# kernels = ["triton_", "cpp_"]
# lines = ["x[ids] * 2 + 1"]
# fix = 'ids inside 0 to 999'
# needs_gpu = true
# ///
