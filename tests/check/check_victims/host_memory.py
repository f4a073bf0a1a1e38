"""A kernel reads pinned and registered memory of the host by its address, once too far."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def fetch(address, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x_ptr = address.to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0))


def run(faulty):
    out = torch.empty(64, device="cuda")
    pinned = torch.from_numpy(np.ones(50, np.float32)).pin_memory()
    assert pinned.is_pinned()
    fetch[(1,)](pinned.data_ptr(), out, 51 if faulty else 50, BLOCK=64)
    assert out.sum().item() == 50
    own = np.ones(40, np.float32)
    torch.cuda.cudart().cudaHostRegister(own.ctypes.data, own.nbytes, 0)
    fetch[(1,)](own.ctypes.data, out, 40, BLOCK=64)
    assert out.sum().item() == 40


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
