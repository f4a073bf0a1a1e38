"""Embedding backward: every token adds its gradient to the row of its id."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def embedding_bwd(dy_ptr, ids_ptr, dw_ptr, D, BLOCK: tl.constexpr):
    tok = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    row = tl.load(ids_ptr + tok)
    dy = tl.load(dy_ptr + tok * D + cols, mask=mask, other=0.0)
    dst = dw_ptr + row * D + cols
    acc = tl.load(dst, mask=mask, other=0.0)
    tl.store(dst, acc + dy, mask=mask)


def backward(dy, ids, n_rows):
    D = dy.shape[1]
    dw = torch.zeros(n_rows, D, device=dy.device)
    embedding_bwd[(ids.numel(), triton.cdiv(D, 16))](dy, ids, dw, D, BLOCK=16)
    return dw


torch.manual_seed(0)
vocab, D = 20, 24
ids = torch.randint(0, vocab, (64,), device=DEV)
table = torch.randn(vocab, D, device=DEV, requires_grad=True)
dy = torch.randn(64, D, device=DEV)
torch.nn.functional.embedding(ids, table).backward(dy)
got = backward(dy, ids, vocab)
print("tokens per row:", torch.bincount(ids, minlength=vocab).tolist())
print("max diff", (got - table.grad).abs().max().item())
print("ok")

# /// truth
# title = "tokens with the same id add to one row without an atomic"
# why = "Programs of tokens with the same id read, add and write the same row of dw without an atomic, so on a GPU updates get lost."
# class = "race between programs"
# sources = ["https://github.com/triton-lang/triton/issues/5326"]
# symptom = "nothing: the interpreter runs the programs one after another and the result is right"
# causes = ["race between programs"]
# kernels = ["embedding_bwd"]
# arguments = ["dw_ptr"]
# lines = [
#   "acc = tl.load(dst, mask=mask, other=0.0)",
#   "tl.store(dst, acc + dy, mask=mask)",
#   "embedding_bwd[(ids.numel(), triton.cdiv(D, 16))](dy, ids, dw, D, BLOCK=16)",
# ]
# fix = 'atomic|one program'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "    acc = tl.load(dst, mask=mask, other=0.0)\n    tl.store(dst, acc + dy, mask=mask)\n"
# fix_new = "    tl.atomic_add(dst, dy, mask=mask)\n"
# ///
