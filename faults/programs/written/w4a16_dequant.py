"""Int4 weights (two per byte, one scale per group of 32 along K): dequantise and multiply."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def w4_matvec(x_ptr, q_ptr, s_ptr, y_ptr, K, N, group, BK: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        byte = tl.load(q_ptr + (k[:, None] // 2) * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0)
        w = ((byte >> ((k % 2) * 4)[:, None]) & 0xF).to(tl.float32) - 8.0
        g = k0 // group
        s = tl.load(s_ptr + g * N + n, mask=n < N, other=0.0)[None, :]
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        acc += tl.sum(w * s * x[:, None], axis=0)
    tl.store(y_ptr + n, acc, mask=n < N)


def pack(w, group):
    K, N = w.shape
    s = w.view(K // group, group, N).abs().amax(1) / 7.0
    q = (torch.round(w / s.repeat_interleave(group, 0)) + 8).clamp(0, 15).to(torch.uint8)
    return (q[0::2] | (q[1::2] << 4)).contiguous(), s.contiguous(), (q.float() - 8) * s.repeat_interleave(group, 0)


torch.manual_seed(0)
K, N, group = 128, 48, 32
w = torch.randn(K, N, device=DEV) * torch.logspace(-1, 1, K, device=DEV)[:, None]
x = torch.randn(K, device=DEV)
q, s, w_ref = pack(w, group)
y = torch.empty(N, device=DEV)
w4_matvec[(triton.cdiv(N, 16),)](x, q, s, y, K, N, group, BK=64, BN=16)
want = x @ w_ref
print("relative error", ((y - want).norm() / want.norm()).item())
assert torch.allclose(y, want, rtol=1e-3, atol=1e-3)
print("ok")

# /// truth
# title = "one scale group per K tile although the tile spans two groups"
# why = "The scale of the tile's first group is used for all 64 rows of the K tile, but a group has 32 rows."
# class = "wrong arithmetic"
# sources = [
#   "https://github.com/vllm-project/vllm/pull/39705",
#   "https://github.com/vllm-project/vllm/issues/52576",
# ]
# symptom = "prints a relative error near 0.5, AssertionError; all accesses are in bounds"
# causes = []
# kernels = ["w4_matvec"]
# arguments = ["s_ptr", "group"]
# lines = [
#   "g = k0 // group",
#   "s = tl.load(s_ptr + g * N + n, mask=n < N, other=0.0)[None, :]",
#   "w4_matvec[(triton.cdiv(N, 16),)](x, q, s, y, K, N, group, BK=64, BN=16)",
# ]
# options = ["--suspect"]
# fix_old = "        g = k0 // group\n        s = tl.load(s_ptr + g * N + n, mask=n < N, other=0.0)[None, :]\n"
# fix_new = "        g = k // group\n        s = tl.load(s_ptr + g[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)\n"
# ///
