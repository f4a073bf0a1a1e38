"""Weights are updated on the default stream while a side stream still evaluates with them.

With `right` the update waits for the evaluation.
"""

import sys

import torch


def main(right):
    model = torch.nn.Linear(256, 256).cuda()
    x = torch.randn(64, 256, device="cuda")
    side = torch.cuda.Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            quality = model(x).square().mean()
        loss = model(x).mean()
        loss.backward()
        if right:
            torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    print("quality", quality.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["optimizer.step()"]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
