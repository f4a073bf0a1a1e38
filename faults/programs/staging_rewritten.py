"""One pinned buffer stages each batch; the next one is written before the copy has read it.

With `right` there are two buffers, each with an event that is waited for.
"""

import sys

import torch


def main(right):
    batches = [torch.full((4096,), float(number)) for number in range(6)]
    buffers = [torch.empty(4096, pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]
    copies = torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    for number, batch in enumerate(batches):
        slot = number % 2 if right else 0
        if right:
            events[slot].synchronize()
        staged = buffers[slot]
        staged.copy_(batch)
        with torch.cuda.stream(copies):
            there = staged.to("cuda", non_blocking=True)
            events[slot].record(copies)
        torch.cuda.current_stream().wait_stream(copies)
        there.record_stream(torch.cuda.current_stream())
        total += there.sum()
    print("total", total.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer rewritten in flight"]
# lines = ["staged.copy_(batch)"]
# fix = 'synchronize|wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
