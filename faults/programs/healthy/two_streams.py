"""Two streams, the second of which waits for the first."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


def main():
    x = torch.ones(4000, device=DEVICE)
    first, second = torch.empty_like(x), torch.empty_like(x)
    side = torch.cuda.Stream()
    scale[(16,)](x, first, 4000, 2.0, BLOCK=256)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        scale[(16,)](first, second, 4000, 3.0, BLOCK=256)
    torch.cuda.current_stream().wait_stream(side)
    print("sum", second.sum().item())


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
