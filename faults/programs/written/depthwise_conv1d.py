"""Causal depthwise convolution along time, x is [batch, channel, time]."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def conv1d_dw(x_ptr, w_ptr, b_ptr, y_ptr, C, T, K: tl.constexpr, BLOCK_T: tl.constexpr):
    bc = tl.program_id(0)
    c = bc % C
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_T,), dtype=tl.float32) + tl.load(b_ptr + c)
    for k in range(K):
        src = t - (K - 1) + k
        x = tl.load(x_ptr + bc * T + src, mask=(src >= 0) & (src < T), other=0.0)
        acc += x * tl.load(w_ptr + c * K + k)
    acc = acc * (1.0 / (1.0 + tl.exp(-acc)))
    tl.store(y_ptr + bc * T + t, acc, mask=t < T)


def conv(x, w, b):
    B, C, T = x.shape
    y = torch.empty_like(x)
    BLOCK_T = 32
    grid = (B * C, max(1, T // BLOCK_T))
    conv1d_dw[grid](x, w, b, y, C, T, K=w.shape[1], BLOCK_T=BLOCK_T)
    return y


torch.manual_seed(0)
x = torch.randn(2, 6, 75, device=DEV)
w, b = torch.randn(6, 4, device=DEV), torch.randn(6, device=DEV)
y = conv(x, w, b)
pad = torch.nn.functional.pad(x, (3, 0))
ref = torch.nn.functional.silu(torch.nn.functional.conv1d(pad, w[:, None], b, groups=6))
bad = (y - ref).abs().amax((0, 1)) > 1e-4
print("wrong time steps:", bad.nonzero().flatten().tolist())
if bad.any():
    raise RuntimeError(f"{int(bad.sum())} of {len(bad)} time steps differ")
print("ok")

# /// truth
# title = "grid of the time axis by floor division"
# why = "The second grid axis has T // 32 = 2 programs for 75 time steps, so steps 64..74 are never written."
# class = "grid too small"
# sources = []
# symptom = "prints the wrong time steps 64..74 and raises RuntimeError"
# causes = ["grid too small", "output not written"]
# kernels = ["conv1d_dw"]
# arguments = ["y_ptr", "T"]
# lines = [
#   "grid = (B * C, max(1, T // BLOCK_T))",
#   "conv1d_dw[grid](x, w, b, y, C, T, K=w.shape[1], BLOCK_T=BLOCK_T)",
# ]
# fix = 'Launch|grid|program'
# never = '\bmask\b'
# options = ["--suspect"]
# fix_old = "max(1, T // BLOCK_T)"
# fix_new = "triton.cdiv(T, BLOCK_T)"
# ///
