"""A model trains on a side stream; torch orders its backward pass by itself."""

import torch


def main():
    side = torch.cuda.Stream()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).cuda()
    x = torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    side.wait_stream(torch.cuda.current_stream())
    total = 0.0
    with torch.cuda.stream(side):
        for _ in range(5):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
    torch.cuda.current_stream().wait_stream(side)
    print("total", total, next(model.parameters()).sum().item())


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
