"""GroupNorm of half precision feature maps: one program per (image, group)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def group_norm(x_ptr, w_ptr, b_ptr, y_ptr, C, HW, G, eps, CG: tl.constexpr, BLOCK: tl.constexpr):
    img = tl.program_id(0) // G
    grp = tl.program_id(0) % G
    c = grp * CG + tl.arange(0, CG)[:, None]
    p = tl.arange(0, BLOCK)[None, :]
    mask = p < HW
    at = (img * C + c) * HW + p
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    n = CG * HW
    mean = tl.sum(tl.sum(x, axis=1), axis=0) / n
    var = tl.sum(tl.sum(x * x, axis=1), axis=0) / n - mean * mean
    y = (x - mean) * (1.0 / tl.sqrt(var.to(tl.float32) + eps))
    y = y * tl.load(w_ptr + c) + tl.load(b_ptr + c)
    tl.store(y_ptr + at, y.to(tl.float16), mask=mask)


torch.manual_seed(0)
N, C, H, W, G = 2, 8, 6, 7, 2
w, b = torch.randn(C, device=DEV), torch.randn(C, device=DEV)
for level in (1.0, 120.0):
    x = (torch.randn(N, C, H, W, device=DEV) * level).half()
    y = torch.empty_like(x)
    group_norm[(N * G,)](x, w, b, y, C, H * W, G, 1e-5, CG=C // G, BLOCK=64)
    ref = torch.nn.functional.group_norm(x.float(), G, w, b, 1e-5)
    err = (y.float() - ref).abs().max().item()
    print(f"activations of size {level}: max error {err:.4f}, spread {y.float().std().item():.3f}")
    assert err < 0.05, "group norm lost the signal"
print("ok")

# /// truth
# title = "sums of squares in float16 overflow"
# why = "The tile stays float16, so the sum of squares exceeds 65504 and becomes inf for large activations; the result collapses to the bias."
# class = "nonfinite value"
# sources = []
# symptom = "the first level passes, then AssertionError: group norm lost the signal (no NaN in the output)"
# causes = ["non-finite value", "non-finite padding", "dtype width"]
# kernels = ["group_norm"]
# arguments = ["x_ptr"]
# lines = [
#   "x = tl.load(x_ptr + at, mask=mask, other=0.0)",
#   "var = tl.sum(tl.sum(x * x, axis=1), axis=0) / n - mean * mean",
# ]
# fix = 'float32|wider|float|type|range'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "x = tl.load(x_ptr + at, mask=mask, other=0.0)"
# fix_new = "x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)"
# ///
