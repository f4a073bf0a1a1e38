"""Each stream fills columns of its own of one tensor; a last one reads them all."""

import torch


def main():
    x = torch.randn(64, 64, device="cuda")
    out = torch.empty_like(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for number, stream in enumerate(streams):
        part = slice(16 * number, 16 * number + 16)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out[:, part].copy_(x[:, part] * 2)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
