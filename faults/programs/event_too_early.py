"""An event is recorded before the work that it should stand for.

With `right` it is recorded behind it.
"""

import sys

import torch


def main(right):
    a = torch.randn(256, 256, device="cuda")
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        if not right:
            done.record()
        b = a @ a
        if right:
            done.record()
    with torch.cuda.stream(consumer):
        done.wait()
        c = b.relu()
    torch.cuda.synchronize()
    print("sum", c.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["c = b.relu()"]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
