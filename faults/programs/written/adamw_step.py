"""AdamW step that also reports the norm of the parameter update."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def adamw(p_ptr, g_ptr, m_ptr, v_ptr, norm_ptr, n, lr, b1, b2, eps, wd, c1, c2, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    g = tl.load(g_ptr + offs, mask=mask, other=0.0)
    m = b1 * tl.load(m_ptr + offs, mask=mask, other=0.0) + (1.0 - b1) * g
    v = b2 * tl.load(v_ptr + offs, mask=mask, other=0.0) + (1.0 - b2) * g * g
    p = tl.load(p_ptr + offs, mask=mask, other=0.0)
    new = p * (1.0 - lr * wd) - lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    tl.store(m_ptr + offs, m, mask=mask)
    tl.store(v_ptr + offs, v, mask=mask)
    tl.store(p_ptr + offs, new, mask=mask)
    step = new - tl.load(p_ptr + offs, mask=mask, other=0.0)
    tl.atomic_add(norm_ptr, tl.sum(step * step, axis=0))


torch.manual_seed(0)
lr, b1, b2, eps, wd = 1e-2, 0.9, 0.99, 1e-8, 0.1
p = torch.randn(300, device=DEV)
ref = p.clone().requires_grad_()
opt = torch.optim.AdamW([ref], lr=lr, betas=(b1, b2), eps=eps, weight_decay=wd)
m, v = torch.zeros_like(p), torch.zeros_like(p)
for t in range(1, 4):
    g = torch.randn(300, device=DEV)
    norm = torch.zeros(1, device=DEV)
    before = p.clone()
    adamw[(triton.cdiv(300, 128),)](p, g, m, v, norm, 300, lr, b1, b2, eps, wd, 1 - b1 ** t, 1 - b2 ** t, BLOCK=128)
    ref.grad = g
    opt.step()
    torch.testing.assert_close(p, ref.detach(), atol=1e-5, rtol=1e-5)
    print(f"step {t}: update norm {norm.sqrt().item():.5f}, expected {(p - before).norm().item():.5f}")
if norm.item() > 0:
    print("ok")

# /// truth
# title = "the old parameter is read again after it was overwritten"
# why = "step is computed from a new load of p after the store of p, so it is always 0."
# class = "other"
# sources = []
# symptom = "prints update norm 0.00000 where another value is expected; exit status 0, no ok"
# causes = []
# kernels = ["adamw"]
# arguments = ["p_ptr", "norm_ptr"]
# lines = [
#   "tl.store(p_ptr + offs, new, mask=mask)",
#   "step = new - tl.load(p_ptr + offs, mask=mask, other=0.0)",
# ]
# options = ["--suspect"]
# fix_old = "step = new - tl.load(p_ptr + offs, mask=mask, other=0.0)"
# fix_new = "step = new - p"
# ///
