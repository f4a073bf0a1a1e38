"""Autotuned residual add in place (restored between the trials) and an autotuned kernel with its own output."""
import time
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

def wall_clock(fn, quantiles=None):
    t = time.perf_counter()
    fn()
    t = (time.perf_counter() - t) * 1e3
    return [t, t, t]


CONFIGS = [triton.Config({"BLOCK": b}) for b in (32, 64, 128)]


@triton.autotune(configs=CONFIGS, key=["n"], restore_value=["x_ptr"], do_bench=wall_clock)
@triton.jit
def add_(x_ptr, r_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    r = tl.load(r_ptr + offs, mask=offs < n, other=0.0)
    tl.store(x_ptr + offs, x + r, mask=offs < n)


@triton.autotune(configs=CONFIGS, key=["n"], do_bench=wall_clock)
@triton.jit
def square(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # writes to another tensor: nothing has to be restored
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x * x, mask=offs < n)


torch.manual_seed(0)
x, r = torch.randn(300, device=DEV), torch.randn(300, device=DEV)
want = x + 2 * r
grid = lambda meta: (triton.cdiv(300, meta["BLOCK"]),)
for _ in range(2):
    add_[grid](x, r, 300)
torch.testing.assert_close(x, want)
y = torch.empty_like(x)
square[grid](x, y, 300)
torch.testing.assert_close(y, want * want)
print("ok")
