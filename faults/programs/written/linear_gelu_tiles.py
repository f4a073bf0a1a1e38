"""Fused linear + GELU with grouped tile order (weights are [N, K])."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def linear_gelu(x_ptr, w_ptr, y_ptr, M, N, K, sxm, sxk, swn, swk, sym, syn,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    per_group = GROUP * tiles_n
    first_m = (pid // per_group) * GROUP
    size_m = min(tiles_m - first_m, GROUP)
    pid_m = first_m + (pid % per_group) % size_m
    pid_n = (pid % per_group) // size_m
    rm = pid_m * BM + tl.arange(0, BM)
    rn = pid_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    # wrapping the rows keeps the loads in range
    x_ptrs = x_ptr + (rm % M)[:, None] * sxm + rk[None, :] * sxk
    w_ptrs = w_ptr + (rn % N)[None, :] * swn + rk[:, None] * swk
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc += tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), input_precision="ieee")
        x_ptrs += BK * sxk
        w_ptrs += BK * swk
    acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    y_ptrs = y_ptr + rm[:, None] * sym + rn[None, :] * syn
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(y_ptrs, acc)


def run(x, w):
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty((M, N), device=x.device)
    grid = (triton.cdiv(M, 16) * triton.cdiv(N, 16),)
    linear_gelu[grid](x, w, y, M, N, K, *x.stride(), *w.stride(), *y.stride(), BM=16, BN=16, BK=16, GROUP=2)
    return y


torch.manual_seed(0)
x, w = torch.randn(64, 32, device=DEV), torch.randn(40, 32, device=DEV) / 6
got = run(x, w)
want = torch.nn.functional.gelu(x @ w.t())
assert torch.allclose(got, want, atol=1e-4), f"max diff {(got - want).abs().max().item()}"
print("ok")

# /// truth
# title = "output mask is computed and not passed to the store"
# why = "tl.store is called without the computed mask, so the last column tile (N=40 in tiles of 16) writes over the beginning of the next row and past the end of y."
# class = "missing mask"
# sources = ["https://github.com/Dao-AILab/flash-attention/pull/2822"]
# symptom = "varies: AssertionError (allclose) or abort (heap corruption: corrupted size vs. prev_size)"
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "race between programs",
# ]
# kernels = ["linear_gelu"]
# arguments = ["y_ptr"]
# lines = ["mask = (rm < M)[:, None] & (rn < N)[None, :]", "tl.store(y_ptrs, acc)"]
# fix = 'mask'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "tl.store(y_ptrs, acc)"
# fix_new = "tl.store(y_ptrs, acc, mask=mask)"
# ///
