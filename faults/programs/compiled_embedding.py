"""A model under torch.compile is given a token that its table has no row for.

With `right` it has.
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(128, 16)
        self.out = torch.nn.Linear(16, 8)

    def forward(self, tokens):
        hidden = self.table(tokens) * 0.5
        return self.out(torch.relu(hidden)).sum(-1)


def main(right):
    model = torch.compile(Model().to(DEVICE))
    tokens = torch.arange(16, device=DEVICE).reshape(4, 4)
    if not right:
        tokens[2, 3] = 128
    with torch.no_grad():
        print("shape", tuple(model(tokens).cpu().shape))


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["triton_", "cpp_"]
# lines = ["self.table(tokens)"]
# is_recorded_on_cpu = false
# fix = 'tokens inside 0 to 127'
# options = ["--suspect"]
# ///
