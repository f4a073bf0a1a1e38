"""Sums by atomics into a workspace that is never cleared, and uses it twice."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl


@triton.jit
def add_up(x_ptr, w_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(w_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), 0))


def main():
    x, workspace = torch.randn(90), torch.empty(1)
    for _ in range(2):
        add_up[(2,)](x, workspace, 90, BLOCK=64)
    torch.testing.assert_close(workspace[0], x.sum())


main()
