"""A cross entropy that leaves out labels of -100."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def cross_entropy(x_ptr, labels_ptr, loss_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    if label == -100:
        tl.store(loss_ptr + row, 0.0)
        return
    most, total = -float("inf"), 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + column, mask=column < width, other=-float("inf"))
        now = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - now) + tl.sum(tl.exp(x - now), axis=0)
        most = now
    tl.store(loss_ptr + row, most + tl.log(total) - tl.load(x_ptr + row * width + label))


def main():
    x = torch.randn(10, 333, device=DEVICE)
    labels = torch.tensor([3, -100, 5, 332, 0, -100, 7, 8, 9, 10], device=DEVICE)
    loss = torch.empty(10, device=DEVICE)
    cross_entropy[(10,)](x, labels, loss, 333, BLOCK=128)
    expected = torch.nn.functional.cross_entropy(x, labels, reduction="sum")
    print("is close", abs(loss.sum().item() - expected.item()) < 1e-2)


if __name__ == "__main__":
    main()
