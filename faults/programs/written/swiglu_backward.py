"""SwiGLU backward that overwrites e and g with their gradients to save memory."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def swiglu_bwd(dw_ptr, e_ptr, g_ptr, h_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    dw = tl.load(dw_ptr + offs, mask=mask, other=0.0)
    e = tl.load(e_ptr + offs, mask=mask, other=0.0)
    g = tl.load(g_ptr + offs, mask=mask, other=0.0)
    se = 1.0 / (1.0 + tl.exp(-e))
    f = e * se
    dg = dw * f
    de = dw * g * se * (1.0 + e * (1.0 - se))
    tl.store(h_ptr + offs, f * g, mask=mask)
    tl.store(e_ptr + offs, dg, mask=mask)
    tl.store(g_ptr + offs, de, mask=mask)


torch.manual_seed(0)
rows, width = 7, 90
e = torch.randn(rows, width, device=DEV, requires_grad=True)
g = torch.randn(rows, width, device=DEV, requires_grad=True)
dw = torch.randn(rows, width, device=DEV)
h = torch.nn.functional.silu(e) * g
h.backward(dw)

e_buf, g_buf = e.detach().clone(), g.detach().clone()
h_buf = torch.empty_like(e_buf)
n = e_buf.numel()
swiglu_bwd[(triton.cdiv(n, 128),)](dw, e_buf, g_buf, h_buf, n, BLOCK=128)
print("h ", (h_buf - h).abs().max().item())
print("de", (e_buf - e.grad).abs().max().item())
print("dg", (g_buf - g.grad).abs().max().item())
assert (e_buf - e.grad).abs().max() < 1e-4 and (g_buf - g.grad).abs().max() < 1e-4
print("ok")

# /// truth
# title = "the two gradients are stored into each other's buffer"
# why = "The gradient of g is stored into e's buffer and the gradient of e into g's buffer."
# class = "wrong arithmetic"
# sources = ["https://github.com/unslothai/unsloth/issues/3314"]
# symptom = "prints large differences of de and dg, then AssertionError"
# causes = []
# kernels = ["swiglu_bwd"]
# arguments = ["e_ptr", "g_ptr"]
# lines = ["tl.store(e_ptr + offs, dg, mask=mask)", "tl.store(g_ptr + offs, de, mask=mask)"]
# options = ["--suspect"]
# fix_old = "    tl.store(e_ptr + offs, dg, mask=mask)\n    tl.store(g_ptr + offs, de, mask=mask)\n"
# fix_new = "    tl.store(e_ptr + offs, de, mask=mask)\n    tl.store(g_ptr + offs, dg, mask=mask)\n"
# ///
