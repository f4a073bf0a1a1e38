"""Mark repeated (row, token) pairs of a chunk of a long batch by one flat key per token."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def flat_keys(tok_ptr, key_ptr, n_rows, width, first_row, vocab, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    tok = tl.load(tok_ptr + r * width + cols, mask=keep, other=0)
    key = (first_row + r) * vocab + tok
    tl.store(key_ptr + r * width + cols, key, mask=keep)


def repeated(tokens, first_row, vocab):
    rows, width = tokens.shape
    keys = torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device)
    flat_keys[(rows,)](tokens, keys, rows, width, first_row, vocab, BLOCK=triton.next_power_of_2(width))
    uniq, counts = keys.flatten().unique(return_counts=True)
    return keys, uniq[counts > 1]


torch.manual_seed(0)
vocab = 151936
tokens = torch.randint(0, 200, (8, 30), dtype=torch.int32, device=DEV)
for first_row in (0, 14130):
    keys, again = repeated(tokens, first_row, vocab)
    rows, toks = again // vocab, again % vocab
    print(f"chunk at row {first_row}: {len(again)} repeated pairs, rows {rows.min().item()}..{rows.max().item()}")
    want = (first_row + torch.arange(8, device=DEV))[:, None] * vocab + tokens.long()
    assert torch.equal(keys, want), "keys do not match"
print("ok")

# /// truth
# title = "row * vocab is computed in 32 bits"
# why = "(first_row + r) * vocab is an int32 product and wraps for rows from 14134 on, although the keys are stored as int64."
# class = "offset overflow"
# sources = [
#   "https://github.com/databricks/megablocks/pull/185",
#   "https://github.com/microsoft/dion/pull/103",
# ]
# symptom = "prints negative rows for the second chunk, AssertionError: keys do not match"
# causes = ["offset overflow", "dtype width"]
# kernels = ["flat_keys"]
# arguments = ["key_ptr", "first_row", "vocab"]
# lines = [
#   "r = tl.program_id(0)",
#   "key = (first_row + r) * vocab + tok",
#   "tl.store(key_ptr + r * width + cols, key, mask=keep)",
#   "flat_keys[(rows,)](tokens, keys, rows, width, first_row, vocab, BLOCK=triton.next_power_of_2(width))",
# ]
# fix = '64'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "key = (first_row + r) * vocab + tok"
# fix_new = "key = (first_row + r).to(tl.int64) * vocab + tok"
# ///
