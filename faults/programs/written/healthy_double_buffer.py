"""Jacobi iterations between two buffers, and a two-slot ring whose old slot is overwritten on purpose."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def jacobi(src_ptr, dst_ptr, f_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    left = tl.load(src_ptr + i - 1, mask=mask & (i > 0), other=0.0)
    right = tl.load(src_ptr + i + 1, mask=mask & (i + 1 < n), other=0.0)
    f = tl.load(f_ptr + i, mask=mask, other=0.0)
    tl.store(dst_ptr + i, 0.5 * (left + right + f), mask=mask)


@triton.jit
def ring_sum(x_ptr, ring_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(ring_ptr + c, tl.load(x_ptr + c))
    for t in range(1, steps):
        new, old = t % 2, (t - 1) % 2
        carry = tl.load(ring_ptr + old * BLOCK + c)
        tl.store(ring_ptr + new * BLOCK + c, carry + tl.load(x_ptr + t * BLOCK + c))
    tl.store(out_ptr + c, tl.load(ring_ptr + ((steps - 1) % 2) * BLOCK + c))


torch.manual_seed(0)
n = 50
f = torch.randn(n, device=DEV)
a, b = torch.zeros(n, device=DEV), torch.empty(n, device=DEV)
ref = torch.zeros(n, device=DEV)
for _ in range(9):
    jacobi[(triton.cdiv(n, 16),)](a, b, f, n, BLOCK=16)
    a, b = b, a
    pad = torch.nn.functional.pad(ref, (1, 1))
    ref = 0.5 * (pad[:-2] + pad[2:] + f)
torch.testing.assert_close(a, ref)
x = torch.randn(7, 16, device=DEV)
ring, out = torch.empty(2, 16, device=DEV), torch.empty(16, device=DEV)
ring_sum[(1,)](x, ring, out, 7, BLOCK=16)
torch.testing.assert_close(out, x.sum(0), atol=1e-5, rtol=1e-5)
print("ok")
