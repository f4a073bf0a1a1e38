"""Tiled matmul with bias; b comes transposed from a linear layer."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def matmul(a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scm, scn,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(a_ptr + rm[:, None] * sam + rk[None, :] * sak,
                    mask=(rm < M)[:, None] & (rk < K)[None, :], other=0.0)
        b = tl.load(b_ptr + rk[:, None] * sbk + rn[None, :] * sbn,
                    mask=(rk < K)[:, None] & (rn < N)[None, :], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    acc += tl.load(bias_ptr + rn, mask=rn < N, other=0.0)[None, :]
    tl.store(c_ptr + rm[:, None] * scm + rn[None, :] * scn, acc, mask=(rm < M)[:, None] & (rn < N)[None, :])


def linear(x, weight, bias):
    (M, K), N = x.shape, weight.shape[0]
    w = weight.t()
    y = torch.empty((M, N), device=x.device)
    matmul[(triton.cdiv(M, 16), triton.cdiv(N, 16))](
        x, w, bias, y, M, N, K,
        x.stride(0), x.stride(1),
        w.stride(1), w.stride(0),
        y.stride(0), y.stride(1), BM=16, BN=16, BK=16)
    return y


torch.manual_seed(0)
x = torch.randn(24, 40, device=DEV)
weight, bias = torch.randn(40, 40, device=DEV), torch.randn(40, device=DEV)
y = linear(x, weight, bias)
want = torch.nn.functional.linear(x, weight, bias)
print("max diff", (y - want).abs().max().item())
assert (y - want).abs().max() < 1e-3
print("ok")

# /// truth
# title = "the two strides of b are exchanged"
# why = "The strides of w are passed as (stride(1), stride(0)) for (sbk, sbn), so the kernel multiplies by the matrix that is not transposed; square, hence in bounds."
# class = "wrong stride"
# sources = []
# undecided = "The matrix is square and read whole either way, so the strides are as well those of a product with the matrix itself; only the program's own expectation says which one is meant."
# symptom = "prints max diff, AssertionError"
# causes = ["wrong stride", "scalar out of range"]
# kernels = ["matmul"]
# arguments = ["b_ptr", "sbk", "sbn"]
# lines = [
#   "b = tl.load(b_ptr + rk[:, None] * sbk + rn[None, :] * sbn,",
#   "matmul[(triton.cdiv(M, 16), triton.cdiv(N, 16))](",
#   "w.stride(1), w.stride(0),",
# ]
# fix = 'stride|sbk|sbn'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "w.stride(1), w.stride(0),"
# fix_new = "w.stride(0), w.stride(1),"
# ///
