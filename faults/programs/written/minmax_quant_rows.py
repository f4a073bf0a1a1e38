"""Asymmetric uint8 quantisation of activations: one scale and one offset per row."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def quant_rows(x_ptr, q_ptr, scale_ptr, low_ptr, n_cols, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < n_cols
    x = tl.load(x_ptr + row * stride + cols, mask=keep)
    hi = tl.max(x, axis=0)
    lo = tl.min(x, axis=0)
    scale = tl.maximum((hi - lo) / 255.0, 1e-8)
    q = (x - lo) / scale + 0.5
    tl.store(q_ptr + row * n_cols + cols, q.to(tl.uint8), mask=keep)
    tl.store(scale_ptr + row, scale)
    tl.store(low_ptr + row, lo)


def quantise(x):
    rows, n_cols = x.shape
    q = torch.empty((rows, n_cols), dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, device=x.device)
    low = torch.empty(rows, device=x.device)
    quant_rows[(rows,)](x, q, scale, low, n_cols, x.stride(0), BLOCK=triton.next_power_of_2(n_cols))
    return q, scale, low


torch.manual_seed(0)
x = torch.rand(6, 100, device=DEV) + 4.0
q, scale, low = quantise(x)
back = q.float() * scale[:, None] + low[:, None]
step = (x.amax(1) - x.amin(1)) / 255.0
worst = ((back - x).abs().amax(1) / step).max().item()
print(f"worst error: {worst:.2f} quantisation steps")
assert worst < 0.75, "round trip is off by more than one step"
print("ok")

# /// truth
# title = "row min/max of a padded masked load without other"
# why = "The masked load has no `other`, so the padding lanes (100..127) hold undefined values which enter the row's min and max and make scale and offset wrong."
# class = "undefined lanes"
# sources = [
#   "https://github.com/flagos-ai/FlagGems/issues/3716",
#   "https://github.com/ROCm/aiter/issues/4288",
# ]
# symptom = "AssertionError: round trip is off by more than one step"
# causes = ["undefined lane", "uninitialised read"]
# kernels = ["quant_rows"]
# arguments = ["x_ptr"]
# lines = [
#   "x = tl.load(x_ptr + row * stride + cols, mask=keep)",
#   "hi = tl.max(x, axis=0)",
#   "lo = tl.min(x, axis=0)",
# ]
# fix = 'other|where|undefined|mask'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "    hi = tl.max(x, axis=0)\n    lo = tl.min(x, axis=0)\n"
# fix_new = "    hi = tl.max(tl.where(keep, x, -float(\"inf\")), axis=0)\n    lo = tl.min(tl.where(keep, x, float(\"inf\")), axis=0)\n"
# ///
