"""A model under torch.compile takes rows of what an embedding gave; one row is behind its end."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN204
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(128, 16)

    def forward(self, tokens, rows):
        hidden = self.table(tokens) * 0.5
        return hidden[rows].relu().sum(-1)


def main():
    torch.manual_seed(0)
    model = torch.compile(Model())
    rows = torch.arange(8)
    rows[5] = 12
    with torch.no_grad():
        print(model(torch.arange(12), rows).shape)


main()
