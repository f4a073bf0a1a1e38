"""Broadcast add with stride 0 inputs: a row, a column and a scalar are expanded, not copied."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def add3(a_ptr, b_ptr, c_ptr, o_ptr, M, N, sam, san, sbm, sbn, scm, scn, BM: tl.constexpr, BN: tl.constexpr):
    m = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    mask = (m < M) & (n < N)
    a = tl.load(a_ptr + m * sam + n * san, mask=mask, other=0.0)
    b = tl.load(b_ptr + m * sbm + n * sbn, mask=mask, other=0.0)
    c = tl.load(c_ptr + m * scm + n * scn, mask=mask, other=0.0)
    tl.store(o_ptr + m * N + n, a + b * c, mask=mask)


def fused(a, b, c):
    a, b, c = torch.broadcast_tensors(a, b, c)
    M, N = a.shape
    out = torch.empty((M, N), device=a.device)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    add3[grid](a, b, c, out, M, N, *a.stride(), *b.stride(), *c.stride(), BM=16, BN=16)
    return out


torch.manual_seed(0)
row, col, one = torch.randn(1, 50, device=DEV), torch.randn(19, 1, device=DEV), torch.randn((), device=DEV)
got = fused(row, col, one)
print(got.shape, "strides of the inputs:", [t.stride() for t in torch.broadcast_tensors(row, col, one)])
torch.testing.assert_close(got, row + col * one)
print("ok")
