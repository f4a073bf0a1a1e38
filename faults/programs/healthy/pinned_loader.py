"""A DataLoader with pinned memory and worker threads of its own feeds a training loop."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 4, (256,)))
    loader = DataLoader(data, batch_size=32, pin_memory=True)
    model = torch.nn.Linear(32, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    for x, label in loader:
        with torch.cuda.stream(copies):
            x, label = x.cuda(non_blocking=True), label.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        x.record_stream(torch.cuda.current_stream())
        label.record_stream(torch.cuda.current_stream())
        loss = torch.nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print("total", total.item())


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
