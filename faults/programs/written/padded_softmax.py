"""Softmax of attention scores with a key padding mask; padded batch entries have no keys."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def masked_softmax(s_ptr, len_ptr, p_ptr, T, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    row = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    n = tl.load(len_ptr + b)
    at = (b * T + row) * T + cols
    s = tl.load(s_ptr + at, mask=cols < n, other=-float("inf"))
    s = s - tl.max(s, axis=0)
    e = tl.exp(s)
    p = e / tl.sum(e, axis=0)
    tl.store(p_ptr + at, p, mask=cols < T)


torch.manual_seed(0)
B, T, D = 3, 10, 16
lens = torch.tensor([10, 6, 0], dtype=torch.int32, device=DEV)      # the last entry only fills the batch
q, k, v = (torch.randn(B, T, D, device=DEV) for _ in range(3))
scores = (q @ k.transpose(1, 2) * D ** -0.5).contiguous()
probs = torch.empty_like(scores)
masked_softmax[(B, T)](scores, lens, probs, T, BLOCK=16)
out = probs @ v
loss = out.pow(2).mean()
print("loss", loss.item())
ref = torch.zeros_like(out)
for b, n in enumerate(lens.tolist()):
    if n:
        ref[b] = torch.softmax(scores[b, :, :n], -1) @ v[b, :n]
print("reference loss", ref.pow(2).mean().item())
if torch.isfinite(loss):
    torch.testing.assert_close(out, ref)
    print("ok")

# /// truth
# title = "softmax of a row without a single valid key"
# why = "For an entry of length 0 the maximum is -inf and s - max is (-inf) - (-inf) = NaN."
# class = "nonfinite value"
# sources = [
#   "https://github.com/flashinfer-ai/flashinfer/pull/4401",
#   "https://github.com/pytorch/pytorch/pull/131060",
# ]
# symptom = "prints loss nan, exit status 0"
# causes = ["non-finite value", "non-finite padding"]
# kernels = ["masked_softmax"]
# arguments = ["s_ptr", "p_ptr", "len_ptr"]
# lines = [
#   "s = tl.load(s_ptr + at, mask=cols < n, other=-float(\"inf\"))",
#   "s = s - tl.max(s, axis=0)",
#   "p = e / tl.sum(e, axis=0)",
# ]
# fix = 'row|mask|max|finite|clamp'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "    s = s - tl.max(s, axis=0)\n    e = tl.exp(s)\n    p = e / tl.sum(e, axis=0)\n"
# fix_new = "    s = s - tl.maximum(tl.max(s, axis=0), -1e30)\n    e = tl.exp(s)\n    p = e / tl.maximum(tl.sum(e, axis=0), 1e-30)\n"
# ///
