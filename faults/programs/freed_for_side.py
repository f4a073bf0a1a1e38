"""A tensor is freed while a side stream still reads it, and its memory is given out again.

With `right` record_stream keeps it until then.
"""

import sys

import torch


def main(right):
    side = torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        x = torch.randn(1 << 18, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total += x.square().sum()
        if right:
            x.record_stream(side)
        del x
    torch.cuda.synchronize()
    print("total", total.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["memory reused in flight"]
# lines = ["x = torch.randn("]
# fix = 'record_stream|wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
