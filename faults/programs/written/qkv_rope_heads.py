"""Rotary embedding applied in place to the q heads of a packed qkv buffer."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def rope_heads(q_ptr, cos_ptr, sin_ptr, stride_tok, stride_head, n_heads,
               HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    tok = tl.program_id(0)
    pid_h = tl.program_id(1)
    base = q_ptr + tok * stride_tok + pid_h * BLOCK_H * stride_head
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, HALF)
    mask = (h < n_heads)[:, None]
    cos = tl.load(cos_ptr + tok * HALF + d)[None, :]
    sin = tl.load(sin_ptr + tok * HALF + d)[None, :]
    left = base + h[:, None] * stride_head + d[None, :]
    a = tl.load(left, mask=mask, other=0.0)
    b = tl.load(left + HALF, mask=mask, other=0.0)
    tl.store(left, a * cos - b * sin, mask=mask)
    tl.store(left + HALF, b * cos + a * sin, mask=mask)


torch.manual_seed(0)
T, HQ, HKV, D, BLOCK_H = 5, 6, 2, 16, 4
qkv = torch.randn(T, HQ + 2 * HKV, D, device=DEV)
q, k, v = qkv.split([HQ, HKV, HKV], dim=1)
angle = torch.arange(T, device=DEV)[:, None] * (10000.0 ** (-torch.arange(D // 2, device=DEV) / (D // 2)))[None]
cos, sin = angle.cos().contiguous(), angle.sin().contiguous()
q0, k0 = q.clone(), k.clone()

grid = (T, triton.cdiv(HQ, BLOCK_H))
rope_heads[grid](q, cos, sin, q.stride(0), q.stride(1), HQ, HALF=D // 2, BLOCK_H=BLOCK_H)

a, b = q0.chunk(2, dim=-1)
want = torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
torch.testing.assert_close(q, want)
print("q rotated, max diff", (q - want).abs().max().item())
scores = torch.einsum("thd,shd->hts", q[:, :HKV], k)
ref = torch.einsum("thd,shd->hts", want[:, :HKV], k0)
print("scores max diff", (scores - ref).abs().max().item())
if not torch.allclose(scores, ref, atol=1e-5):
    raise SystemExit("attention scores do not match the reference")
print("ok")

# /// truth
# title = "head mask compares the block-local head number with the total number of heads"
# why = "The mask tests the head number within the block (0..3) against the global head count 6, so in the last partial block every lane passes and heads 6 and 7, which are the k heads of the packed buffer, are rotated too."
# class = "wrong mask"
# sources = ["https://github.com/NVIDIA/Megatron-LM/issues/7103"]
# symptom = "q is right; the later score check ends the program with SystemExit (k was changed)"
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "grid too small",
#   "output not written",
# ]
# kernels = ["rope_heads"]
# arguments = ["q_ptr", "n_heads"]
# lines = [
#   "mask = (h < n_heads)[:, None]",
#   "tl.store(left, a * cos - b * sin, mask=mask)",
#   "tl.store(left + HALF, b * cos + a * sin, mask=mask)",
# ]
# fix = 'pid_h|BLOCK_H|< n_heads'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "mask = (h < n_heads)[:, None]"
# fix_new = "mask = (pid_h * BLOCK_H + h < n_heads)[:, None]"
# ///
