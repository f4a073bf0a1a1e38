"""Many healthy launches; prints microseconds each, and milliseconds of a large product."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import time

import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def seconds(do, number):
    for _ in range(3):
        do()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(number):
        do()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / number


def main():
    x, y = torch.randn(4096, device="cuda"), torch.empty(4096, device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    launches = [seconds(lambda: add[(4,)](x, y, 4096, B=1024), 5000) for _ in range(5)]
    products = [seconds(lambda: a @ a, 200) for _ in range(5)]
    print(f"{min(launches) * 1e6:.2f} {min(products) * 1e3:.4f}")


main()
