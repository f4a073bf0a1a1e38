"""Reads the unwritten padding of a ragged buffer and throws it away with tl.where."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def ragged_max_sum(x_ptr, len_ptr, max_ptr, sum_ptr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, WIDTH)
    n = tl.load(len_ptr + row)
    # the row is allocated to its full width: no mask is needed on the load
    x = tl.load(x_ptr + row * WIDTH + cols)
    inside = cols < n
    tl.store(max_ptr + row, tl.max(tl.where(inside, x, -float("inf")), axis=0))
    tl.store(sum_ptr + row, tl.sum(tl.where(inside, x, 0.0), axis=0))


torch.manual_seed(0)
lens = torch.tensor([3, 16, 9, 1], dtype=torch.int32, device=DEV)
buf = torch.empty(4, 16, device=DEV)
for r, n in enumerate(lens.tolist()):
    buf[r, :n] = torch.randn(n, device=DEV)
hi, total = torch.empty(4, device=DEV), torch.empty(4, device=DEV)
ragged_max_sum[(4,)](buf, lens, hi, total, WIDTH=16)
for r, n in enumerate(lens.tolist()):
    assert hi[r] == buf[r, :n].max()
    assert torch.allclose(total[r], buf[r, :n].sum(), atol=1e-5)
print("ok")
