"""Pack padded sequences into one buffer and take the mean of each of them."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def build_cu_seqlens(len_ptr, cu_ptr, B, BLOCK: tl.constexpr):
    b = tl.arange(0, BLOCK)
    n = tl.load(len_ptr + b, mask=b < B, other=0)
    tl.store(cu_ptr + b, tl.cumsum(n, axis=0), mask=b < B)


@triton.jit
def pack(x_ptr, cu_ptr, packed_ptr, len_ptr, T, D: tl.constexpr):
    b = tl.program_id(0)
    t = tl.program_id(1)
    d = tl.arange(0, D)
    if t < tl.load(len_ptr + b):
        row = tl.load(cu_ptr + b) + t
        tl.store(packed_ptr + row * D + d, tl.load(x_ptr + (b * T + t) * D + d))


@triton.jit
def segment_mean(packed_ptr, cu_ptr, out_ptr, D: tl.constexpr):
    b = tl.program_id(0)
    d = tl.arange(0, D)
    lo = tl.load(cu_ptr + b)
    hi = tl.load(cu_ptr + b + 1)
    acc = tl.zeros((D,), dtype=tl.float32)
    for r in range(lo, hi):
        acc += tl.load(packed_ptr + r * D + d)
    tl.store(out_ptr + b * D + d, acc / (hi - lo))


torch.manual_seed(0)
B, T, D = 4, 9, 16
x = torch.randn(B, T, D, device=DEV)
lens = torch.tensor([5, 9, 2, 6], dtype=torch.int32, device=DEV)
cu = torch.zeros(B + 1, dtype=torch.int32, device=DEV)
packed = torch.zeros(B * T, D, device=DEV)
out = torch.empty(B, D, device=DEV)
build_cu_seqlens[(1,)](lens, cu, B, BLOCK=8)
pack[(B, T)](x, cu, packed, lens, T, D=D)
segment_mean[(B,)](packed, cu, out, D=D)
want = torch.stack([x[b, :n].mean(0) for b, n in enumerate(lens.tolist())])
print("cu_seqlens", cu.tolist())
print("max diff per sequence", (out - want).abs().amax(1).tolist())
assert torch.allclose(out, want, atol=1e-5)
print("ok")

# /// truth
# title = "cu_seqlens is written one place too early"
# why = "build_cu_seqlens stores the inclusive sums from place 0 on instead of from place 1, so every sequence is packed at the end of its own range and the last one has the range [22, 0)."
# class = "off by one"
# sources = []
# undecided = "Every access is inside and every launch does what its text says; that the sums belong one place later only the program's own expectation says."
# symptom = "prints cu_seqlens [5, 14, 16, 22, 0] and differences, AssertionError"
# origin_kernel = "build_cu_seqlens"
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "index out of range",
#   "sentinel consumed",
# ]
# kernels = ["build_cu_seqlens"]
# arguments = ["cu_ptr"]
# lines = [
#   "tl.store(cu_ptr + b, tl.cumsum(n, axis=0), mask=b < B)",
#   "build_cu_seqlens[(1,)](lens, cu, B, BLOCK=8)",
# ]
# fix = '\\+ 1|inside|write|cu'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "tl.store(cu_ptr + b, tl.cumsum"
# fix_new = "tl.store(cu_ptr + b + 1, tl.cumsum"
# ///
