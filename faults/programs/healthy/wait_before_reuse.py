"""Memory is freed while a side stream reads it, which is waited for before the next use."""

import torch


def main():
    side = torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    for _ in range(4):
        x = torch.randn(1 << 16, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total += x.sum()
        del x
        torch.cuda.current_stream().wait_stream(side)
    done = torch.cuda.Event()
    done.record()
    while not done.query():
        pass
    print("total", total.item())


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
