"""Causal attention forward with grouped-query heads, layout [head, time, dim]."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def attn_fwd(q_ptr, k_ptr, v_ptr, o_ptr, T, H, H_KV, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    pid_m = tl.program_id(0)
    h = tl.program_id(1)
    kv = h // H_KV
    rm = pid_m * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + (h * T + rm[:, None]) * D + d[None, :], mask=rm[:, None] < T, other=0.0)
    m = tl.full((BM,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, D), dtype=tl.float32)
    for n0 in range(0, min((pid_m + 1) * BM, T), BN):
        rn = n0 + tl.arange(0, BN)
        at = (kv * T + rn[:, None]) * D + d[None, :]
        k = tl.load(k_ptr + at, mask=rn[:, None] < T, other=0.0)
        v = tl.load(v_ptr + at, mask=rn[:, None] < T, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((rn[None, :] <= rm[:, None]) & (rn[None, :] < T), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p, v, input_precision="ieee")
        m = m_new
    tl.store(o_ptr + (h * T + rm[:, None]) * D + d[None, :], acc / l[:, None], mask=rm[:, None] < T)


torch.manual_seed(0)
H, H_KV, T, D = 8, 4, 37, 16
q = torch.randn(H, T, D, device=DEV)
k, v = torch.randn(H_KV, T, D, device=DEV), torch.randn(H_KV, T, D, device=DEV)
o = torch.empty_like(q)
attn_fwd[(triton.cdiv(T, 16), H)](q, k, v, o, T, H, H_KV, D ** -0.5, D=D, BM=16, BN=16)
rep = H // H_KV
ref = torch.nn.functional.scaled_dot_product_attention(
    q, k.repeat_interleave(rep, 0), v.repeat_interleave(rep, 0), is_causal=True)
for h in range(H):
    print(f"head {h}: max diff {(o[h] - ref[h]).abs().max().item():.2e}")
torch.testing.assert_close(o, ref, atol=1e-4, rtol=1e-4)
print("ok")

# /// truth
# title = "kv head is computed with the number of kv heads instead of the group size"
# why = "The kv head is h // H_KV (4) and must be h // (H // H_KV) (2); heads 2..7 read the K and V of another group, all in bounds."
# class = "wrong arithmetic"
# sources = []
# undecided = "Every head reads keys and values inside of their tensors; which ones it should read only the program's own expectation says."
# symptom = "prints a difference per head, assert_close fails"
# causes = [
#   "index out of range",
#   "sentinel consumed",
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
# ]
# kernels = ["attn_fwd"]
# arguments = ["k_ptr", "v_ptr", "H_KV", "o_ptr"]
# lines = ["kv = h // H_KV", "at = (kv * T + rn[:, None]) * D + d[None, :]"]
# options = ["--suspect"]
# fix_old = "kv = h // H_KV"
# fix_new = "kv = h // (H // H_KV)"
# ///
