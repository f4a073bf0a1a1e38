"""Split-K matmul for tall reductions: every slice of K adds its partial product atomically."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def matmul_splitk(a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scm, scn,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    pid_k = tl.program_id(2)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(pid_k * BK, K, BK * SPLIT):
        rk = k + tl.arange(0, BK)
        a = tl.load(a_ptr + rm[:, None] * sam + rk[None, :] * sak,
                    mask=(rm < M)[:, None] & (rk < K)[None, :], other=0.0)
        b = tl.load(b_ptr + rk[:, None] * sbk + rn[None, :] * sbn,
                    mask=(rk < K)[:, None] & (rn < N)[None, :], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    tl.atomic_add(c_ptr + rm[:, None] * scm + rn[None, :] * scn, acc,
                  mask=(rm < M)[:, None] & (rn < N)[None, :])


def matmul(a, b, split=4):
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=torch.float32)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16), split)
    matmul_splitk[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BM=16, BN=16, BK=16, SPLIT=split)
    return c


torch.manual_seed(0)
a, b = torch.randn(24, 200, device=DEV), torch.randn(200, 40, device=DEV)
want = a @ b
for step in range(3):
    got = matmul(a, b)
    print("step", step, "max diff", (got - want).abs().max().item())
assert (got - want).abs().max() < 1e-3
print("ok")

# /// truth
# title = "atomic accumulation into torch.empty"
# why = "The output into which the slices add atomically is allocated with torch.empty, so the result is the product plus whatever the memory held."
# class = "uninitialised read"
# sources = ["https://github.com/ByteDance-Seed/Triton-distributed/issues/182"]
# symptom = "max diff grows when memory is reused (it may be right by luck in the first step), AssertionError"
# causes = ["uninitialised read", "output not written"]
# kernels = ["matmul_splitk"]
# arguments = ["c_ptr"]
# lines = [
#   "tl.atomic_add(c_ptr + rm[:, None] * scm + rn[None, :] * scn, acc,",
#   "c = torch.empty((M, N), device=a.device, dtype=torch.float32)",
#   "matmul_splitk[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BM=16, BN=16, BK=16, SPLIT=split)",
# ]
# fix = 'clear|zero'
# never = 'mask'
# options = ["--suspect"]
# fix_old = "c = torch.empty((M, N)"
# fix_new = "c = torch.zeros((M, N)"
# ///
