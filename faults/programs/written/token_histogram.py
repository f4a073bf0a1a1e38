"""Count how often each token id occurs (repetition penalty)."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def count_tokens(ids_ptr, count_ptr, length, stride, vocab, BLOCK: tl.constexpr):
    seq = tl.program_id(0)
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        keep = offs < length
        tok = tl.load(ids_ptr + seq * stride + offs, mask=keep, other=0)
        here = count_ptr + seq * vocab + tok
        seen = tl.load(here, mask=keep, other=0)
        tl.store(here, seen + 1, mask=keep)


def penalise(logits, ids, penalty):
    B, vocab = logits.shape
    counts = torch.zeros(B, vocab, dtype=torch.int32, device=logits.device)
    count_tokens[(B,)](ids, counts, ids.shape[1], ids.stride(0), vocab, BLOCK=16)
    return logits - penalty * counts, counts


torch.manual_seed(0)
B, vocab, length = 3, 12, 40
ids = torch.randint(0, vocab, (B, length), device=DEV)
logits = torch.randn(B, vocab, device=DEV)
out, counts = penalise(logits, ids, 0.3)
want = torch.stack([torch.bincount(r, minlength=vocab) for r in ids])
print("counted", counts.sum(1).tolist(), "of", length)
torch.testing.assert_close(out, logits - 0.3 * want)
print("ok")

# /// truth
# title = "two lanes with the same token: one count is lost"
# why = "Lanes of one block with the same token all read the old count and write count + 1, so a block counts a token once at most."
# class = "lost update in a program"
# sources = ["https://github.com/triton-lang/triton/issues/4233"]
# symptom = "prints fewer counted tokens than there are, assert_close fails"
# causes = ["race between lanes", "race between programs"]
# kernels = ["count_tokens"]
# arguments = ["count_ptr"]
# lines = ["seen = tl.load(here, mask=keep, other=0)", "tl.store(here, seen + 1, mask=keep)"]
# fix = 'atomic'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "        seen = tl.load(here, mask=keep, other=0)\n        tl.store(here, seen + 1, mask=keep)\n"
# fix_new = "        tl.atomic_add(here, 1, mask=keep)\n"
# ///
