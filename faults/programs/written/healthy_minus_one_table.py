"""Block table padded with -1: the entry is clamped before use and the lanes are masked."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def copy_pages(pool_ptr, table_ptr, len_ptr, out_ptr, max_pages, PAGE: tl.constexpr, D: tl.constexpr):
    seq = tl.program_id(0)
    i = tl.program_id(1)
    n = tl.load(len_ptr + seq)
    page = tl.maximum(tl.load(table_ptr + seq * max_pages + i), 0)
    slot = tl.arange(0, PAGE)[:, None]
    d = tl.arange(0, D)[None, :]
    live = i * PAGE + slot < n
    x = tl.load(pool_ptr + (page * PAGE + slot) * D + d, mask=live & (d < D), other=0.0)
    tl.store(out_ptr + ((seq * max_pages + i) * PAGE + slot) * D + d, x)


torch.manual_seed(0)
PAGE, D = 4, 8
pool = torch.randn(6, PAGE, D, device=DEV)
lens = torch.tensor([6, 12, 3], dtype=torch.int32, device=DEV)
table = torch.tensor([[5, 2, -1], [0, 1, 4], [3, -1, -1]], dtype=torch.int32, device=DEV)
out = torch.empty(3, 3 * PAGE, D, device=DEV)
copy_pages[(3, 3)](pool, table, lens, out, 3, PAGE=PAGE, D=D)
for s, n in enumerate(lens.tolist()):
    flat = pool[table[s].clamp(min=0).long()].reshape(-1, D)
    assert torch.equal(out[s, :n], flat[:n]) and (out[s, n:] == 0).all()
print("ok")
