"""`.to("cpu", non_blocking=True)` gives a tensor that the host uses before it is filled.

With `right` an event is waited for.
"""

import sys

import torch


def main(right):
    x = torch.randn(1024, 1024, device="cuda")
    y = (x @ x).to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    if right:
        done.synchronize()
    largest = y.max()
    torch.cuda.synchronize()
    print("largest", float(largest))


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer read in flight"]
# lines = ["largest = y.max()"]
# fix = 'synchronize'
# options = ["--suspect"]
# needs_gpu = true
# ///
