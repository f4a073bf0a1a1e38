"""torch.nn.Embedding with an id that its table has not: a device-side assert of torch's kernel."""

# mypy: ignore-errors
import torch


def main():
    table = torch.nn.Embedding(100, 64, device="cuda")
    ids = torch.arange(16, device="cuda")
    ids[7] = 100
    print(table(ids).sum().item())


main()

# /// truth
# causes = ["assertion of a kernel", "index out of range"]
# fix = 'inside|below|<|range|index'
# options = []
# needs_gpu = true
# ///
