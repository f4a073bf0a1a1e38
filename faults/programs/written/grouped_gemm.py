"""Grouped GEMM over a table of pointers (one weight per expert)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def grouped_gemm(a_ptrs, b_ptrs, c_ptrs, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    g = tl.program_id(0)
    a_ptr = tl.load(a_ptrs + g).to(tl.pointer_type(tl.float32))
    b_ptr = tl.load(b_ptrs + g).to(tl.pointer_type(tl.float32))
    c_ptr = tl.load(c_ptrs + g).to(tl.pointer_type(tl.float32))
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rn = tl.program_id(2) * BN + tl.arange(0, BN)
    rk = tl.arange(0, K)
    a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=rm[:, None] < M, other=0.0)
    b = tl.load(b_ptr + rk[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], tl.dot(a, b, input_precision="ieee"), mask=(rm[:, None] < M) & (rn[None, :] < N))


def table(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEV)


def run(xs, ws):
    """ys[g] = xs[g] @ ws[g].t()"""
    M, K = xs[0].shape
    N = ws[0].shape[0]
    ys = [torch.empty(M, N, device=DEV) for _ in xs]
    b_table = table(w.t().contiguous() for w in ws)
    grid = (len(xs), triton.cdiv(M, 16), triton.cdiv(N, 16))
    grouped_gemm[grid](table(xs), b_table, table(ys), M, N, K=K, BM=16, BN=16)
    return ys


torch.manual_seed(0)
xs = [torch.randn(20, 32, device=DEV) for _ in range(3)]
ws = [torch.randn(24, 32, device=DEV) for _ in range(3)]
ys = run(xs, ws)
for g, (x, w, y) in enumerate(zip(xs, ws, ys)):
    print("group", g, "max diff", (y - x @ w.t()).abs().max().item())
assert all(torch.allclose(y, x @ w.t(), atol=1e-4) for x, w, y in zip(xs, ws, ys))
print("ok")

# /// truth
# title = "the pointer table points at temporaries that are freed before the launch"
# why = "The contiguous transposes are temporaries of a generator: only their addresses are kept, the memory is freed (and reused) before the kernel reads it."
# class = "use after free"
# sources = []
# symptom = "prints differences (groups share one freed buffer), AssertionError"
# causes = ["use after free", "wild pointer", "null pointer"]
# kernels = ["grouped_gemm"]
# arguments = ["b_ptrs"]
# lines = [
#   "b = tl.load(b_ptr + rk[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)",
#   "return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEV)",
#   "b_table = table(w.t().contiguous() for w in ws)",
#   "grouped_gemm[grid](table(xs), b_table, table(ys), M, N, K=K, BM=16, BN=16)",
# ]
# fix = 'keep|alive|free|address|pointer'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "    b_table = table(w.t().contiguous() for w in ws)\n"
# fix_new = "    wts = [w.t().contiguous() for w in ws]\n    b_table = table(wts)\n"
# ///
