"""Picks rows by a list of which one entry is wrong, in a tuned kernel, and notices the result."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl


@triton.jit
def pick(ptr, at):
    return tl.load(ptr + at)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def gather(table_ptr, ids_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, pick(table_ptr, ids), mask=i < n)


def main() -> None:
    table, ids, out = torch.arange(100.0), torch.arange(90), torch.empty(90)
    ids[70] = 107
    gather[lambda meta: (triton.cdiv(90, meta["BLOCK"]),)](table, ids, out, 90)
    assert torch.equal(out, table[:90]), "wrong result"


main()
