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
    s = s - tl.maximum(tl.max(s, axis=0), -1e30)
    e = tl.exp(s)
    p = e / tl.maximum(tl.sum(e, axis=0), 1e-30)
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
