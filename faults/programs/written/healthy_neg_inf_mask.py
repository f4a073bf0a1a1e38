"""Sliding-window softmax: -inf everywhere outside the window, and rows without keys give 0."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def window_softmax(s_ptr, p_ptr, T, first, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    s = tl.load(s_ptr + row * T + cols, mask=cols < T, other=-float("inf"))
    live = (cols <= row) & (cols > row - WINDOW) & (cols >= first)
    s = tl.where(live, s, -float("inf"))
    m = tl.max(s, axis=0)
    m = tl.where(m == -float("inf"), 0.0, m)      # a row without keys
    e = tl.exp(s - m)
    l = tl.sum(e, axis=0)
    tl.store(p_ptr + row * T + cols, e / tl.where(l == 0.0, 1.0, l), mask=cols < T)


torch.manual_seed(0)
T, WINDOW, first = 21, 5, 3
s = torch.randn(T, T, device=DEV)
p = torch.empty_like(s)
window_softmax[(T,)](s, p, T, first, WINDOW=WINDOW, BLOCK=32)
i, j = torch.arange(T, device=DEV)[:, None], torch.arange(T, device=DEV)[None]
bias = torch.zeros(T, T, device=DEV).masked_fill(~((j <= i) & (j > i - WINDOW) & (j >= first)), -float("inf"))
want = torch.softmax(s + bias, -1).nan_to_num(0.0)   # the first rows have no key at all
torch.testing.assert_close(p, want)
assert (p[:first] == 0).all()
print("ok")
