"""Tensor descriptors, made in the kernel and on the host, that say more rows than there are."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def transpose(desc, y_ptr, rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    block = desc.load([tl.program_id(0) * ROWS, 0])
    out = tl.make_tensor_descriptor(
        y_ptr, shape=[COLS, rows], strides=[rows, 1], block_shape=[COLS, ROWS]
    )
    out.store([0, tl.program_id(0) * ROWS], block.T)


def run(faulty):
    x = torch.randn(32, 16, device="cuda")
    y = torch.empty(16, 32, device="cuda")
    rows = 48 if faulty else 32
    desc = TensorDescriptor(x, [rows, 16], [16, 1], [16, 16])
    transpose[(rows // 16,)](desc, y, 32, ROWS=16, COLS=16)
    assert torch.equal(y, x.T)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
