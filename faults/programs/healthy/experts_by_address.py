"""Several products in one launch; the addresses of their operands stand in a tensor."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def row_sums(list_ptr, sizes_ptr, out_ptr, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    x_ptr = tl.load(list_ptr + number).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes_ptr + number)
    total = 0.0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + at, mask=at < size, other=0.0), axis=0)
    tl.store(out_ptr + number, total)


def main():
    vectors = [torch.ones(50 * (i + 1), device=DEVICE) for i in range(4)]
    addresses = torch.tensor([v.data_ptr() for v in vectors], device=DEVICE)
    sizes = torch.tensor([v.numel() for v in vectors], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, device=DEVICE)
    row_sums[(4,)](addresses, sizes, out, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main()
