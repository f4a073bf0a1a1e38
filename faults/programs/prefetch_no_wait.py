"""Batches are copied on a stream of their own, and used before the copy has ended.

With `right` their use waits.
"""

import sys

import torch


def main(right):
    batches = [torch.randn(128, 256).pin_memory() for _ in range(4)]
    weight = torch.randn(256, 256, device="cuda")
    copies = torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    kept = []
    for batch in batches:
        with torch.cuda.stream(copies):
            there = batch.to("cuda", non_blocking=True)
        kept.append(there)
        if right:
            torch.cuda.current_stream().wait_stream(copies)
        total += (there @ weight).sum()
    torch.cuda.synchronize()
    print("total", total.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["there @ weight"]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
