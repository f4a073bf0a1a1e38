"""LayerNorm backward (input gradient), several rows per program."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def ln_bwd_dx(dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, M, N, BR: tl.constexpr, BC: tl.constexpr):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    cols = tl.arange(0, BC)[None, :]
    mask = (rows < M) & (cols < N)
    at = rows * N + cols
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    xhat = tl.where(mask, (x - mean) * rstd, 0.0)
    wdy = w * dy
    c1 = tl.sum(wdy, axis=1)[:, None] / N
    c2 = tl.sum(wdy * xhat) / N
    tl.store(dx_ptr + at, (wdy - c1 - xhat * c2) * rstd, mask=mask)


torch.manual_seed(0)
M, N = 10, 40
x = torch.randn(M, N, device=DEV, requires_grad=True)
w = torch.randn(N, device=DEV)
dy = torch.randn(M, N, device=DEV)
torch.nn.functional.layer_norm(x, (N,), w).backward(dy)
mean = x.detach().mean(1)
rstd = torch.rsqrt(x.detach().var(1, unbiased=False) + 1e-5)
dx = torch.empty_like(dy)
ln_bwd_dx[(triton.cdiv(M, 4),)](dy, x.detach(), w, mean, rstd, dx, M, N, BR=4, BC=64)
torch.testing.assert_close(dx, x.grad, atol=1e-4, rtol=1e-4)
print("ok")

# /// truth
# title = "tl.sum without axis over a tile of several rows"
# why = "c2 is summed over the whole tile (no axis), so the rows of a program share the sum of all its rows."
# class = "wrong arithmetic"
# sources = ["https://github.com/flagos-ai/FlagGems/pull/59"]
# symptom = "assert_close fails; all accesses are in bounds"
# causes = []
# kernels = ["ln_bwd_dx"]
# arguments = ["dx_ptr"]
# lines = [
#   "c2 = tl.sum(wdy * xhat) / N",
#   "tl.store(dx_ptr + at, (wdy - c1 - xhat * c2) * rstd, mask=mask)",
# ]
# options = ["--suspect"]
# fix_old = "c2 = tl.sum(wdy * xhat) / N"
# fix_new = "c2 = tl.sum(wdy * xhat, axis=1)[:, None] / N"
# ///
