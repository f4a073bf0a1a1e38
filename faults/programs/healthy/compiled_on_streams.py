"""A compiled function runs on a side stream, between waits in both directions."""

import torch


@torch.compile
def step(x, weight):
    return torch.nn.functional.gelu(x @ weight) * 2 + 1


def main():
    x, weight = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(4):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = step(x, weight)
        torch.cuda.current_stream().wait_stream(side)
        x = y / y.norm()
    torch.cuda.synchronize()
    print("sum", x.sum().item())


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
