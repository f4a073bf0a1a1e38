"""Single-token decode over a paged KV cache; pages come back dirty from earlier requests."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def paged_decode(q_ptr, k_ptr, v_ptr, table_ptr, len_ptr, o_ptr, scale, max_pages,
                 PAGE: tl.constexpr, D: tl.constexpr):
    seq = tl.program_id(0)
    d = tl.arange(0, D)
    slot = tl.arange(0, PAGE)
    q = tl.load(q_ptr + seq * D + d)
    seq_len = tl.load(len_ptr + seq)
    m, l = -float("inf"), 0.0
    acc = tl.zeros((D,), dtype=tl.float32)
    for i in range(0, tl.cdiv(seq_len, PAGE)):
        page = tl.load(table_ptr + seq * max_pages + i)
        live = i * PAGE + slot < seq_len
        at = page * PAGE * D + slot[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=live[:, None], other=0.0)
        s = tl.where(live, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=0))
        p = tl.exp(s - m_new)
        alpha = tl.exp(m - m_new)
        v = tl.load(v_ptr + at)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        l = l * alpha + tl.sum(p, axis=0)
        m = m_new
    tl.store(o_ptr + seq * D + d, acc / l)


torch.manual_seed(0)
PAGE, D, n_pages = 8, 16, 10
lens = torch.tensor([13, 8, 21], dtype=torch.int32, device=DEV)
table = torch.tensor([[7, 2, 0], [4, 0, 0], [9, 1, 5]], dtype=torch.int32, device=DEV)
k_pool = torch.full((n_pages, PAGE, D), float("nan"), device=DEV)
v_pool = torch.full((n_pages, PAGE, D), float("nan"), device=DEV)
q = torch.randn(3, D, device=DEV)
out = torch.empty_like(q)
want = torch.empty_like(q)
for s, n in enumerate(lens.tolist()):
    k, v = torch.randn(n, D, device=DEV), torch.randn(n, D, device=DEV)
    for t in range(n):
        page = table[s, t // PAGE]
        k_pool[page, t % PAGE], v_pool[page, t % PAGE] = k[t], v[t]
    want[s] = torch.softmax(k @ q[s] * D ** -0.5, 0) @ v
paged_decode[(3,)](q, k_pool, v_pool, table, lens, out, D ** -0.5, 3, PAGE=PAGE, D=D)
print(out[:, :4])
assert not out.isnan().any(), "NaN in the attention output"
torch.testing.assert_close(out, want)
print("ok")

# /// truth
# title = "V of the unwritten tail of the last page is loaded; 0 * NaN"
# why = "The V load is not masked by seq_len: the slots after the end of the sequence hold NaN, their weight is 0, and 0 * NaN makes the output NaN."
# class = "missing mask"
# sources = [
#   "https://github.com/vllm-project/vllm/pull/47305",
#   "https://github.com/ROCm/aiter/pull/5401",
# ]
# symptom = "prints NaN rows, AssertionError: NaN in the attention output"
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "non-finite value",
#   "non-finite padding",
#   "uninitialised read",
#   "output not written",
# ]
# kernels = ["paged_decode"]
# arguments = ["v_ptr"]
# lines = [
#   "v = tl.load(v_ptr + at)",
#   "acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)",
#   "v_pool = torch.full((n_pages, PAGE, D), float(\"nan\"), device=DEV)",
# ]
# fix = 'mask|live'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "v = tl.load(v_ptr + at)"
# fix_new = "v = tl.load(v_ptr + at, mask=live[:, None], other=0.0)"
# ///
