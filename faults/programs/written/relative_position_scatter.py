"""Sum the relative positions of the neighbours of every node (message passing in 2-D)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def scatter_add_2d(out_ptr, idx_ptr, src_ptr, n_cols, out_stride, src_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < n_cols
    node = tl.load(idx_ptr + row * n_cols + cols, mask=keep, other=0)
    val = tl.load(src_ptr + row * src_stride + cols, mask=keep, other=0.0)
    tl.atomic_add(out_ptr + node * out_stride + cols, val, mask=keep)


def scatter_add(out, index, src):
    """out[index[i, j], j] += src[i, j]; fast path for 2-D tensors"""
    rows, cols = src.shape
    scatter_add_2d[(rows,)](out, index, src, cols, out.stride(0), src.stride(0),
                            BLOCK=triton.next_power_of_2(cols))
    return out


torch.manual_seed(0)
nodes, n_edges = 12, 40
pos = torch.randn(nodes, 2, device=DEV)
edges = torch.randint(0, nodes, (2, n_edges), device=DEV)
dst, src = edges[0], edges[1]
rel = pos[src] - pos[dst]
index = dst.view(-1, 1).expand(-1, 2)
got = scatter_add(torch.zeros(nodes, 2, device=DEV), index, rel)
want = torch.zeros(nodes, 2, device=DEV).scatter_add_(0, index, rel)
print("max abs diff", (got - want).abs().max().item())
torch.testing.assert_close(got, want)
print("ok")

# /// truth
# title = "scatter_add fast path takes an expanded (stride 0) index as contiguous"
# why = "index is a view with strides (1, 0) made by expand(), but the kernel addresses it as a contiguous (rows, cols) tensor."
# class = "wrong stride"
# sources = [
#   "https://github.com/flagos-ai/FlagGems/issues/6017",
#   "https://github.com/flagos-ai/Torch-FL/issues/349",
# ]
# symptom = "assert_close fails; the reads stay within the storage of `edges`"
# causes = ["wrong stride", "scalar out of range"]
# kernels = ["scatter_add_2d"]
# arguments = ["idx_ptr"]
# lines = [
#   "node = tl.load(idx_ptr + row * n_cols + cols, mask=keep, other=0)",
#   "scatter_add_2d[(rows,)](out, index, src, cols, out.stride(0), src.stride(0),",
#   "index = dst.view(-1, 1).expand(-1, 2)",
# ]
# fix = 'contiguous|stride'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "scatter_add_2d[(rows,)](out, index, src,"
# fix_new = "scatter_add_2d[(rows,)](out, index.contiguous(), src,"
# ///
