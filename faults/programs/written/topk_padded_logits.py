"""Top-k of the logits; the vocabulary is padded to a multiple of 16 in the LM head."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def topk_rows(x_ptr, val_ptr, idx_ptr, row_stride, n_cols, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + cols, mask=cols < n_cols, other=-float("inf"))
    for k in range(K):
        best = tl.argmax(x, axis=0)
        tl.store(val_ptr + row * K + k, tl.max(x, axis=0))
        tl.store(idx_ptr + row * K + k, best)
        x = tl.where(cols == best, -float("inf"), x)


def topk(logits, k):
    rows, n_cols = logits.shape
    vals = torch.empty((rows, k), dtype=logits.dtype, device=logits.device)
    idx = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    topk_rows[(rows,)](logits, vals, idx, n_cols, n_cols, K=k, BLOCK=triton.next_power_of_2(n_cols))
    return vals, idx


torch.manual_seed(0)
vocab, padded, hidden = 50, 64, 32
head = torch.randn(hidden, padded, device=DEV)
h = torch.randn(6, hidden, device=DEV)
logits = (h @ head)[:, :vocab]
vals, idx = topk(logits, 4)
ref_vals, ref_idx = logits.topk(4)
wrong = (idx != ref_idx).any(1)
print("rows with other tokens:", wrong.nonzero().flatten().tolist())
print("ok" if not wrong.any() else "sampling would differ")

# /// truth
# title = "kernel takes a column slice of a padded matrix as contiguous"
# why = "logits is a slice with row pitch 64, but the wrapper passes its width 50 as the row stride."
# class = "wrong stride"
# sources = ["https://github.com/vllm-project/vllm/issues/42684"]
# symptom = "prints the rows that differ and 'sampling would differ'; exit status 0"
# causes = ["wrong stride", "scalar out of range"]
# kernels = ["topk_rows"]
# arguments = ["x_ptr", "row_stride"]
# lines = [
#   "x = tl.load(x_ptr + row * row_stride + cols, mask=cols < n_cols, other=-float(\"inf\"))",
#   "topk_rows[(rows,)](logits, vals, idx, n_cols, n_cols, K=k, BLOCK=triton.next_power_of_2(n_cols))",
# ]
# fix = 'stride'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "topk_rows[(rows,)](logits, vals, idx, n_cols, n_cols,"
# fix_new = "topk_rows[(rows,)](logits, vals, idx, logits.stride(0), n_cols,"
# ///
