"""A small model under torch.compile, with changing batches."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)
    model = torch.nn.Sequential(wide, torch.nn.GELU(), torch.nn.LayerNorm(64), narrow).to(DEVICE)
    compiled = torch.compile(model)
    for batch in (4, 9):
        x = torch.randn(batch, 32, device=DEVICE)
        print("is close", bool((compiled(x) - model(x)).abs().max() < 1e-3))


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
