"""LayerNorm forward for widths that are no power of two."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    mean_acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        mean_acc += tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0)
    mean = tl.sum(mean_acc, axis=0) / N
    var_acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0)
        x = tl.where(cols < N, x - mean, 0.0)
        var_acc += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(var_acc, axis=0) / BLOCK + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0)
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
        b = tl.load(b_ptr + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * stride + cols, (x - mean) * rstd * w + b, mask=cols < N)


torch.manual_seed(0)
for N in (64, 100):
    x = torch.randn(5, N, device=DEV)
    w, b = torch.randn(N, device=DEV), torch.randn(N, device=DEV)
    y, mean, rstd = torch.empty_like(x), torch.empty(5, device=DEV), torch.empty(5, device=DEV)
    layer_norm[(5,)](x, w, b, y, mean, rstd, x.stride(0), N, 1e-5, BLOCK=64)
    ref = torch.nn.functional.layer_norm(x, (N,), w, b, 1e-5)
    print(N, "max diff", (y - ref).abs().max().item())
    assert torch.allclose(y, ref, atol=1e-4)
print("ok")

# /// truth
# title = "variance is divided by BLOCK instead of the width"
# why = "The sum of squares is divided by BLOCK (64) instead of N, which is right only for N == BLOCK."
# class = "wrong arithmetic"
# sources = []
# symptom = "N=64 passes, AssertionError for N=100; all accesses are in bounds"
# causes = []
# kernels = ["layer_norm"]
# arguments = ["rstd_ptr", "y_ptr", "N"]
# lines = [
#   "rstd = 1.0 / tl.sqrt(tl.sum(var_acc, axis=0) / BLOCK + eps)",
#   "tl.store(y_ptr + row * stride + cols, (x - mean) * rstd * w + b, mask=cols < N)",
# ]
# options = ["--suspect"]
# fix_old = "tl.sum(var_acc, axis=0) / BLOCK + eps"
# fix_new = "tl.sum(var_acc, axis=0) / N + eps"
# ///
