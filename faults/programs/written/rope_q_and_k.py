"""Rotary embedding of q and k in one launch; k has fewer heads."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def rotate(x_ptr, y_ptr, at, cos, sin, HALF: tl.constexpr):
    a = tl.load(x_ptr + at)
    b = tl.load(x_ptr + at + HALF)
    tl.store(y_ptr + at, a * cos - b * sin)
    tl.store(y_ptr + at + HALF, b * cos + a * sin)


@triton.jit
def rope_qk(q_ptr, k_ptr, qo_ptr, ko_ptr, cos_ptr, sin_ptr, HQ, HK,
            sqb, sqt, sqh, skb, skt, skh, T, HALF: tl.constexpr):
    b = tl.program_id(0) // T
    t = tl.program_id(0) % T
    d = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + t * HALF + d)
    sin = tl.load(sin_ptr + t * HALF + d)
    for h in range(HQ):
        rotate(q_ptr, qo_ptr, b * sqb + t * sqt + h * sqh + d, cos, sin, HALF)
    for h in range(HK):
        rotate(k_ptr, ko_ptr, b * skb + t * skt + h * skh + d, cos, sin, HALF)


def rope(q, k, cos, sin):
    B, T, HQ, D = q.shape
    qo, ko = torch.empty_like(q), torch.empty_like(k)
    rope_qk[(B * T,)](q, k, qo, ko, cos, sin, HQ, k.shape[2], *q.stride()[:3], *q.stride()[:3], T, HALF=D // 2)
    return qo, ko


torch.manual_seed(0)
B, T, HQ, HK, D = 2, 5, 4, 2, 16
q, k = torch.randn(B, T, HQ, D, device=DEV), torch.randn(B, T, HK, D, device=DEV)
angle = torch.rand(T, D // 2, device=DEV) * 3
cos, sin = angle.cos(), angle.sin()
qo, ko = rope(q, k, cos, sin)
for name, x, y in (("q", q, qo), ("k", k, ko)):
    a, b = x.chunk(2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    ref = torch.cat([a * c - b * s, b * c + a * s], -1)
    torch.testing.assert_close(y, ref, msg=lambda m: f"{name}: {m}")
print("ok")

# /// truth
# title = "k is addressed with the strides of q"
# why = "The launch passes q's strides for k too; k has half the heads, so tokens are read and written at twice the distance, past the ends of k and ko."
# class = "wrong stride"
# sources = ["https://github.com/Comfy-Org/comfy-kitchen/pull/77"]
# symptom = "segmentation fault before any output (the heap was overwritten)"
# causes = [
#   "wrong stride",
#   "scalar out of range",
#   "index out of range",
#   "sentinel consumed",
#   "missing tail mask",
#   "off by one",
#   "buffer too small",
# ]
# kernels = ["rope_qk"]
# arguments = ["k_ptr", "ko_ptr", "skb", "skt", "skh"]
# lines = [
#   "a = tl.load(x_ptr + at)",
#   "rotate(k_ptr, ko_ptr, b * skb + t * skt + h * skh + d, cos, sin, HALF)",
#   "rope_qk[(B * T,)](q, k, qo, ko, cos, sin, HQ, k.shape[2], *q.stride()[:3], *q.stride()[:3], T, HALF=D // 2)",
# ]
# fix = 'stride|skb|skt|skh'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "*q.stride()[:3], *q.stride()[:3], T"
# fix_new = "*q.stride()[:3], *k.stride()[:3], T"
# ///
