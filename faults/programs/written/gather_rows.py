"""Gather the rows of the best k scores (reranking)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def gather_rows(x_ptr, ids_ptr, out_ptr, n, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    # ids are int32 like everywhere else in the engine
    ids = tl.load(ids_ptr.to(tl.pointer_type(tl.int32)) + r, mask=r < n, other=0)
    mask = (r < n)[:, None] & (d < D)[None, :]
    rows = tl.load(x_ptr + ids[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + r[:, None] * D + d[None, :], rows, mask=mask)


def best_rows(x, scores, k):
    ids = scores.topk(k).indices
    out = torch.empty(k, x.shape[1], device=x.device)
    gather_rows[(triton.cdiv(k, 4),)](x, ids, out, k, x.shape[1], BLOCK_R=4,
                                      BLOCK_D=triton.next_power_of_2(x.shape[1]))
    return out, ids


torch.manual_seed(0)
x = torch.randn(50, 24, device=DEV)
scores = torch.rand(50, device=DEV)
out, ids = best_rows(x, scores, 10)
same = (out == x[ids]).all(1)
print("ids ", ids.tolist())
print("same", same.tolist())
if not same.all():
    print("WARNING: reranked rows do not belong to their scores")
else:
    print("ok")

# /// truth
# title = "int64 indices of topk read as int32"
# why = "topk returns int64 indices but the kernel casts the pointer to int32, so it reads the low and high halves of the first five indices in turn."
# class = "dtype width"
# sources = []
# symptom = "prints a warning, exit status 0; every second row is row 0; all accesses are in bounds"
# causes = ["dtype width"]
# kernels = ["gather_rows"]
# arguments = ["ids_ptr"]
# lines = [
#   "ids = tl.load(ids_ptr.to(tl.pointer_type(tl.int32)) + r, mask=r < n, other=0)",
#   "ids = scores.topk(k).indices",
#   "gather_rows[(triton.cdiv(k, 4),)](x, ids, out, k, x.shape[1], BLOCK_R=4,",
# ]
# fix = 'int32|width|type|cast|bytes'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "ids = scores.topk(k).indices"
# fix_new = "ids = scores.topk(k).indices.to(torch.int32)"
# ///
