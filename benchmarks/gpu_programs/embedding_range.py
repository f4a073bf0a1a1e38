"""torch.nn.Embedding with an id that its table has not: a device-side assert of torch's kernel."""

# mypy: ignore-errors
# ruff: noqa: ANN201
import torch


def main():
    table = torch.nn.Embedding(100, 64, device="cuda")
    ids = torch.arange(16, device="cuda")
    ids[7] = 100
    print(table(ids).sum().item())


main()
