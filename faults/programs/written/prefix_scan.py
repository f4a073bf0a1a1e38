"""Inclusive prefix sums of a long row, block by block with a carry (top-p sampling)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def scan_rows(x_ptr, y_ptr, n, x_stride, y_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    carry = 0.0
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs <= n
        x = tl.load(x_ptr + row * x_stride + offs, mask=mask, other=0.0)
        y = tl.cumsum(x, axis=0) + carry
        tl.store(y_ptr + row * y_stride + offs, y, mask=mask)
        carry += tl.sum(x, axis=0)


def cumsum(x):
    y = torch.empty_like(x)
    scan_rows[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=32)
    return y


torch.manual_seed(0)
probs = torch.softmax(torch.randn(4, 77, device=DEV), -1).sort(descending=True).values
cdf = cumsum(probs)
kept = (cdf - probs < 0.9).sum(1)
print("tokens kept by top-p 0.9:", kept.tolist())
print("last value of the cdf:", [round(v, 4) for v in cdf[:, -1].tolist()])
if (cdf - probs.cumsum(1)).abs().max() < 1e-5:
    print("ok")

# /// truth
# title = "inclusive bound: each row writes one element too many"
# why = "The mask is offs <= n, so each row reads and writes one element past its end: the first element of the next row, or, in the last row, memory past the tensor."
# class = "off by one"
# sources = []
# symptom = "nothing: the next row's program repairs its first element, the last write goes past the end; prints ok"
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "index out of range",
#   "sentinel consumed",
#   "grid too small",
#   "output not written",
#   "race between programs",
# ]
# kernels = ["scan_rows"]
# arguments = ["y_ptr", "x_ptr"]
# lines = [
#   "mask = offs <= n",
#   "x = tl.load(x_ptr + row * x_stride + offs, mask=mask, other=0.0)",
#   "tl.store(y_ptr + row * y_stride + offs, y, mask=mask)",
# ]
# fix = '<'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "mask = offs <= n"
# fix_new = "mask = offs < n"
# ///
