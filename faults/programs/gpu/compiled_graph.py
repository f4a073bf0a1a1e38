"""A healthy model under torch.compile, whose kernels torch captures into graphs by itself."""

# mypy: ignore-errors
import torch


def main():
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)
    ).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    total = 0.0
    with torch.no_grad():
        for _ in range(30):
            torch.compiler.cudagraph_mark_step_begin()
            total += compiled(torch.randn(64, 256, device="cuda")).square().sum().item()
    print(total)


main()

# /// truth
# options = ["--suspect"]
# needs_gpu = true
# ///
