"""A tensor goes through DLPack to a side stream, which writes it while the default stream reads it.

With `right` the side stream waits.
"""

import sys

import torch


def main(right):
    x = torch.randn(1 << 16, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(2):
        norm = x.square().sum()
        alias = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
        if right:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            alias.mul_(0.5)
        torch.cuda.synchronize()
    print("norm", norm.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["alias.mul_("]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
