"""int8 quantisation with a scale per block; the all-zero block gets a scale of its own."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def int8_quant(x_ptr, q_ptr, s_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    amax = tl.max(tl.abs(x), axis=0)
    scale = tl.where(amax > 0.0, amax / 127.0, 1.0)
    tl.store(q_ptr + offs, tl.floor(x / scale + 0.5).to(tl.int8), mask=offs < n)
    tl.store(s_ptr + pid, scale)


torch.manual_seed(0)
n, BLOCK = 200, 64
x = torch.randn(n, device=DEV)
x[64:128] = 0.0
q = torch.empty(n, dtype=torch.int8, device=DEV)
blocks = triton.cdiv(n, BLOCK)
s = torch.empty(blocks, device=DEV)
int8_quant[(blocks,)](x, q, s, n, BLOCK=BLOCK)
back = q.float() * s.repeat_interleave(BLOCK)[:n]
print("scales", s.tolist())
assert torch.isfinite(back).all() and (back[64:128] == 0).all()
assert torch.allclose(back, x, rtol=0.0, atol=0.02)
print("ok")
