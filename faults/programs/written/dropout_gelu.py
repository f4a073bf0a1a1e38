"""Fused GELU + dropout with a given keep mask."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def gelu_dropout(x_ptr, keep_ptr, y_ptr, n, inv_keep, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    keep = tl.load(keep_ptr + offs, mask=mask, other=0)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)) * inv_keep
    tl.store(y_ptr + offs, tl.where(keep != 0, y, 0.0), mask=mask)


def run(x, keep, p, BLOCK=256):
    y = torch.empty_like(x)
    n = x.numel()
    grid = (n // BLOCK,)
    gelu_dropout[grid](x, keep, y, n, 1.0 / (1.0 - p), BLOCK=BLOCK)
    return y


torch.manual_seed(0)
p = 0.25
for shape in ((8, 128), (10, 100)):
    x = torch.randn(shape, device=DEV)
    keep = (torch.rand(shape, device=DEV) > p).to(torch.uint8)
    got = run(x, keep, p)
    want = torch.nn.functional.gelu(x) * keep / (1 - p)
    diff = (got - want).abs().max().item()
    print(shape, "max diff", diff)
    assert diff < 1e-5
print("ok")

# /// truth
# title = "grid by floor division"
# why = "The grid is n // BLOCK, so for n=1000 and BLOCK=256 the last 232 elements are never computed."
# class = "grid too small"
# sources = ["https://github.com/pytorch/pytorch/pull/195546"]
# symptom = "the first shape passes, AssertionError for the second (unwritten tail)"
# causes = ["grid too small", "output not written"]
# kernels = ["gelu_dropout"]
# arguments = ["y_ptr", "n"]
# lines = [
#   "grid = (n // BLOCK,)",
#   "gelu_dropout[grid](x, keep, y, n, 1.0 / (1.0 - p), BLOCK=BLOCK)",
# ]
# fix = 'Launch|grid|program'
# never = '\bmask\b'
# options = ["--suspect"]
# fix_old = "grid = (n // BLOCK,)"
# fix_new = "grid = (triton.cdiv(n, BLOCK),)"
# ///
