"""Block-sparse matrix times dense matrix (CSR of 16x16 blocks)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def bsr_matmul(row_ptr, col_ptr, val_ptr, x_ptr, y_ptr, N, BS: tl.constexpr, BN: tl.constexpr):
    br = tl.program_id(0)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, BS)
    lo = tl.load(row_ptr + br)
    hi = tl.load(row_ptr + br + 1)
    if hi > lo:
        acc = tl.zeros((BS, BN), dtype=tl.float32)
        for b in range(lo, hi):
            bc = tl.load(col_ptr + b)
            w = tl.load(val_ptr + b * BS * BS + i[:, None] * BS + i[None, :])
            x = tl.load(x_ptr + (bc * BS + i)[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
            acc += tl.dot(w, x)
        tl.store(y_ptr + (br * BS + i)[:, None] * N + rn[None, :], acc, mask=rn[None, :] < N)


def spmm(dense, layout, x, BS=16):
    R, C = layout.shape
    row_ptr = torch.zeros(R + 1, dtype=torch.int32, device=DEV)
    row_ptr[1:] = layout.sum(1).cumsum(0)
    blocks = dense.view(R, BS, C, BS).transpose(1, 2)
    vals, cols = blocks[layout].contiguous(), layout.nonzero()[:, 1].to(torch.int32).contiguous()
    y = torch.empty(R * BS, x.shape[1], device=DEV)
    bsr_matmul[(R, triton.cdiv(x.shape[1], 16))](row_ptr, cols, vals, x, y, x.shape[1], BS=BS, BN=16)
    return y


torch.manual_seed(0)
layout = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool, device=DEV)
dense = torch.randn(64, 64, device=DEV) * layout.repeat_interleave(16, 0).repeat_interleave(16, 1)
worst = 0.0
for step in range(3):
    x = torch.randn(64, 24, device=DEV)
    y = spmm(dense, layout, x)
    want = dense @ x
    diff = (y - want).abs().nan_to_num(1e9).view(4, -1).amax(1)
    print("step", step, "max diff per block row", diff.tolist())
    worst = max(worst, diff.max().item())
print("ok" if worst < 1e-3 else "block rows differ")

# /// truth
# title = "block rows without blocks are not written"
# why = "A block row without blocks skips the store as well, and y is torch.empty, so these rows keep whatever the memory held instead of 0."
# class = "output not written"
# sources = []
# symptom = "prints a difference in block row 2 when memory is reused ('block rows differ'), exit status 0"
# causes = ["output not written", "grid too small", "uninitialised read"]
# kernels = ["bsr_matmul"]
# arguments = ["y_ptr"]
# lines = [
#   "if hi > lo:",
#   "tl.store(y_ptr + (br * BS + i)[:, None] * N + rn[None, :], acc, mask=rn[None, :] < N)",
#   "y = torch.empty(R * BS, x.shape[1], device=DEV)",
#   "bsr_matmul[(R, triton.cdiv(x.shape[1], 16))](row_ptr, cols, vals, x, y, x.shape[1], BS=BS, BN=16)",
# ]
# fix = 'clear|zero|write'
# never = '\bmask\b'
# options = ["--suspect"]
# fix_old = "y = torch.empty(R * BS, x.shape[1]"
# fix_new = "y = torch.zeros(R * BS, x.shape[1]"
# ///
