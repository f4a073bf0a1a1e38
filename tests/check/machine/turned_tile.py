"""Turns a tile by way of shared memory; with a number, a pass leaves that store into it out.

A second number is how many rows of the result are stored.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
import sys

import torch
import triton
import triton.language as tl

SIZE = 32


@triton.jit
def turn(x_ptr, out_ptr, num_rows, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    tile = tl.load(x_ptr + rows * SIZE + columns)
    turned = tl.trans(tile)
    tl.store(out_ptr + rows * SIZE + columns, turned, mask=rows < num_rows)


def without_a_store(backend=None, stages=None, options=None, language=None, capability=None):
    if stages is None:
        return sys.argv[1], sys.argv[1]
    own = stages["amdgcn"]

    def amdgcn(source, metadata):
        lines = own(source, metadata).splitlines()
        names = ("ds_write", "ds_store")
        stores = [i for i, line in enumerate(lines) if line.strip().startswith(names)]
        lines[stores[int(sys.argv[1])]] = ""
        return "\n".join(lines) + "\n"

    stages["amdgcn"] = amdgcn


if len(sys.argv) > 1:
    triton.knobs.runtime.add_stages_inspection_hook = without_a_store
x, out = torch.arange(1.0, SIZE * SIZE + 1), torch.zeros(SIZE * SIZE)
turn[(1,)](x, out, int(sys.argv[2]) if len(sys.argv) > 2 else SIZE, SIZE)
