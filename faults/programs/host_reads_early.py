"""Losses are copied to pinned memory without waiting, and read by the host at once.

With `right` it waits for the copy.
"""

import sys

import torch


def main(right):
    x = torch.randn(1 << 16, device="cuda")
    losses = torch.zeros(4, pin_memory=True)
    shown = 0.0
    for step in range(4):
        loss = (x * step).square().mean()
        losses[step].copy_(loss, non_blocking=True)
        if right:
            torch.cuda.current_stream().synchronize()
        shown += losses[step].item()
    print("shown", shown)


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer read in flight"]
# lines = ["losses[step].item()"]
# fix = 'synchronize'
# options = ["--suspect"]
# needs_gpu = true
# ///
