"""A prefetcher copies batches on a stream of its own; a batch is freed while it is still used.

With `right` it is kept for the stream that uses it.
"""

import sys

import torch


class Prefetcher:
    def __init__(self, batches, right):
        self.batches, self.right = iter(batches), right
        self.stream = torch.cuda.Stream()
        self.load()

    def load(self):
        batch = next(self.batches, None)
        self.ready = None
        if batch is not None:
            with torch.cuda.stream(self.stream):
                self.ready = batch.cuda(non_blocking=True)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.ready
        if batch is not None and self.right:
            batch.record_stream(torch.cuda.current_stream())
        self.load()
        return batch


def main(right):
    batches = [torch.randn(256, 256).pin_memory() for _ in range(6)]
    weight = torch.randn(256, 256, device="cuda")
    loader = Prefetcher(batches, right)
    torch.cuda.synchronize()
    total = torch.zeros((), device="cuda")
    batch = loader.next()
    while batch is not None:
        total += (batch @ weight).sum()
        batch = loader.next()
    print("total", total.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["memory reused in flight"]
# lines = ["self.ready = batch.cuda("]
# fix = 'record_stream|wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
