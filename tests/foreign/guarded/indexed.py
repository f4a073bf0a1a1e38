"""Embeds tokens by a tuned kernel with heuristics, of whose ids one is too large by far.

With `right` all ids lie inside the table.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def row_of(table_ptr, index, width, columns):
    return tl.load(table_ptr + index * width + columns, mask=columns < width, other=0.0)


@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=2)], key=["width"])
@triton.heuristics({"EVEN": lambda given: given["width"] % given["BLOCK"] == 0})
@triton.jit
def embed(
    ids_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr, EVEN: tl.constexpr, scale=2.0
):  # fmt: skip
    token = tl.program_id(0)
    index = tl.load(ids_ptr + token)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = row_of(table_ptr, index, width, columns)
    tl.store(out_ptr + token * width + columns, row * scale, mask=columns < width)


def main(right: bool, device: str) -> None:
    table = torch.arange(50.0 * 40, device=device).reshape(50, 40)
    ids = torch.arange(12, dtype=torch.int64, device=device)
    if not right:
        ids[7] = 1 << 33
    out = torch.zeros(12, 40, device=device)
    embed[lambda meta: (12, triton.cdiv(40, meta["BLOCK"]))](ids, table, out, 40)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
