"""The default stream reads a side stream's product before that is there.

With `right` it waits.
"""

import sys

import torch


def main(right):
    a = torch.randn(512, 512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product = a @ a
    if right:
        torch.cuda.current_stream().wait_stream(side)
    shifted = product + 1
    torch.cuda.synchronize()
    print("sum", shifted.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["shifted = product"]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
