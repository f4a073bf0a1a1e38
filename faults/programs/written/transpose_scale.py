"""Transpose with per-column scale: y[n, m] = x[m, n] * s[n]."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def transpose_scale(x_ptr, s_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    load_mask = (rm[:, None] < M) & (rn[None, :] < N)
    x = tl.load(x_ptr + rm[:, None] * N + rn[None, :], mask=load_mask, other=0.0)
    s = tl.load(s_ptr + rn, mask=rn < N, other=0.0)
    y = tl.trans(x * s[None, :])
    store_mask = (rn[:, None] < M) & (rm[None, :] < N)
    tl.store(y_ptr + rn[:, None] * M + rm[None, :], y, mask=store_mask)


def run(x, s):
    M, N = x.shape
    y = torch.full((N, M), float("nan"), device=x.device)
    transpose_scale[(triton.cdiv(M, 16), triton.cdiv(N, 16))](x, s, y, M, N, BM=16, BN=16)
    return y


torch.manual_seed(0)
for M, N in ((32, 32), (20, 45), (45, 20)):
    x, s = torch.randn(M, N, device=DEV), torch.rand(N, device=DEV)
    y = run(x, s)
    want = (x * s).t()
    print((M, N), "nan:", int(y.isnan().sum()), "equal:", torch.equal(y, want))
    assert torch.equal(y, want)
print("ok")

# /// truth
# title = "store mask compares the rows with the number of columns"
# why = "The store mask tests the row index against M and the column index against N although y is [N, M], so for non-square shapes parts of y are not written (or written at wrong places)."
# class = "wrong mask"
# sources = []
# symptom = "square passes; prints the number of nan of the second shape, AssertionError"
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "grid too small",
#   "output not written",
# ]
# kernels = ["transpose_scale"]
# arguments = ["y_ptr"]
# lines = [
#   "store_mask = (rn[:, None] < M) & (rm[None, :] < N)",
#   "tl.store(y_ptr + rn[:, None] * M + rm[None, :], y, mask=store_mask)",
# ]
# fix = 'mask|< N|< M|exchange'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "store_mask = (rn[:, None] < M) & (rm[None, :] < N)"
# fix_new = "store_mask = (rn[:, None] < N) & (rm[None, :] < M)"
# ///
