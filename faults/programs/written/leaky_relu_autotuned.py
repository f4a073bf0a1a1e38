"""In-place leaky ReLU with an autotuned block size."""
import time
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

def wall_clock(fn, quantiles=None):
    fn()
    t = time.perf_counter()
    fn()
    t = (time.perf_counter() - t) * 1e3
    return [t, t, t]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})],
    key=["n"], do_bench=wall_clock,
)
@triton.jit
def leaky_relu_(x_ptr, n, slope, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    tl.store(x_ptr + offs, tl.where(x > 0, x, x * slope), mask=mask)


def leaky_relu(x, slope=0.5):
    n = x.numel()
    leaky_relu_[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n, slope)
    return x


torch.manual_seed(0)
base = torch.randn(5, 123, device=DEV)
want = torch.nn.functional.leaky_relu(base, 0.5)
first = leaky_relu(base.clone())
second = leaky_relu(base.clone())
print("first call :", (first - want).abs().max().item())
print("second call:", (second - want).abs().max().item())
assert torch.equal(second, want)
assert torch.equal(first, want), "the first call is wrong, the second is right"
print("ok")

# /// truth
# title = "autotuned in-place kernel without restore_value"
# why = "The autotuner runs the in-place kernel for each configuration and nothing restores x between the trials, so the slope is applied many times on the first call."
# class = "autotune in place"
# sources = [
#   "https://github.com/flagos-ai/FlagGems/pull/3753",
#   "https://github.com/triton-lang/triton/issues/6547",
# ]
# symptom = "AssertionError: the first call is wrong, the second is right"
# causes = ["autotuned in place", "race between programs"]
# kernels = ["leaky_relu_"]
# arguments = ["x_ptr"]
# lines = [
#   "@triton.autotune(",
#   "key=[\"n\"], do_bench=wall_clock,",
#   "tl.store(x_ptr + offs, tl.where(x > 0, x, x * slope), mask=mask)",
#   "leaky_relu_[lambda meta: (triton.cdiv(n, meta[\"BLOCK\"]),)](x, n, slope)",
# ]
# fix = 'restore_value'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "key=[\"n\"], do_bench=wall_clock,"
# fix_new = "key=[\"n\"], do_bench=wall_clock, restore_value=[\"x_ptr\"],"
# ///
