"""Takes rows by int64 indices that it reads 4 bytes at a time, and compares; with `pairs` on
purpose: the host has put halves there."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def take_rows(x_ptr, ids_ptr, out_ptr, D, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    i = tl.load(ids_ptr.to(tl.pointer_type(tl.int32)) + r)
    tl.store(out_ptr + r * D + d, tl.load(x_ptr + i * D + d, mask=d < D), mask=d < D)


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def take(x, ids):
    out = torch.zeros(len(ids), x.shape[1])
    take_rows[(len(ids),)](x, ids, out, x.shape[1], BLOCK=16)
    return out


def main(way):
    torch.manual_seed(0)
    x = torch.rand(50, 12)
    ids = torch.randperm(50)[:10]
    if way == "pairs":
        halves = torch.randint(1, 50, (10,), dtype=torch.int32)
        halves[1::2] = 0
        ids.view(torch.int32)[:10] = halves
        torch.testing.assert_close(take(x, ids), x[halves.long()])
        return
    if way == "alike":
        x[:] = 1.0
    out = take(x, ids)
    if way == "clone":
        torch.testing.assert_close(out, out.clone())
    elif way == "wide":
        torch.testing.assert_close(out, x[ids], rtol=0, atol=1.5)
    elif way == "again":
        assert torch.equal(out, take(x, ids).clone())
    elif way == "doubled":
        assert torch.allclose(out, out * 2 / 2)
    elif way == "copied":
        other = torch.empty(120)
        copy[(1,)](out, other, 120, BLOCK=128)
        assert torch.equal(other.view(10, 12), out)
    elif way == "saved":
        saved = torch.zeros(20, 12)
        saved[:10] = out
        torch.testing.assert_close(saved[:10], out)
    elif way == "alike":
        torch.testing.assert_close(out, torch.ones(10, 12))
    elif way == "numpy":
        torch.testing.assert_close(out, torch.from_numpy(out.numpy().copy()))


main(sys.argv[1])
