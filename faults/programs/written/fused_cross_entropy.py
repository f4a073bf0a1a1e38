"""Fused cross entropy: the forward saves the log-sum-exp, the backward scales by grad_output."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def ce_forward(x_ptr, y_ptr, loss_ptr, lse_ptr, stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < V, other=-float("inf"))
    m = tl.max(x, axis=0)
    lse = m + tl.log(tl.sum(tl.exp(x - m), axis=0))
    label = tl.load(y_ptr + row)
    tl.store(loss_ptr + row, lse - tl.load(x_ptr + row * stride + label))
    tl.store(lse_ptr + row, lse)


@triton.jit
def ce_backward(x_ptr, y_ptr, lse_ptr, grad_ptr, dx_ptr, stride, grad_stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < V
    x = tl.load(x_ptr + row * stride + cols, mask=keep, other=-float("inf"))
    p = tl.exp(x - tl.load(lse_ptr + row))
    p = tl.where(cols == tl.load(y_ptr + row), p - 1.0, p)
    g = tl.load(grad_ptr + row * grad_stride)
    tl.store(dx_ptr + row * stride + cols, p * g, mask=keep)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        rows, V = x.shape
        loss, lse = torch.empty(rows, device=x.device), torch.empty(rows, device=x.device)
        ce_forward[(rows,)](x, y, loss, lse, x.stride(0), V, BLOCK=triton.next_power_of_2(V))
        ctx.save_for_backward(x, y, lse)
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, y, lse = ctx.saved_tensors
        dx = torch.empty_like(x)
        grad_stride = 1 if grad.numel() > 1 else 0
        ce_backward[(x.shape[0],)](x, y, lse, grad, dx, x.stride(0), grad_stride, x.shape[1],
                                   BLOCK=triton.next_power_of_2(x.shape[1]))
        return dx, None


torch.manual_seed(0)
x = torch.randn(8, 50, device=DEV, requires_grad=True)
y = torch.randint(0, 50, (8,), device=DEV)
CrossEntropy.apply(x, y).sum().backward()
x2 = x.detach().clone().requires_grad_()
torch.nn.functional.cross_entropy(x2, y, reduction="sum").backward()
torch.testing.assert_close(x.grad, x2.grad)
print("ok")

# /// truth
# title = "backward reads grad_output of loss.sum() (one element, expanded) with stride 1"
# why = "grad_output of .sum() is one element expanded with stride 0; the wrapper derives stride 1 from numel() > 1, so rows after the first read past the one-element storage."
# class = "wrong stride"
# sources = ["https://github.com/ROCm/TransformerEngine/pull/623"]
# symptom = "assert_close of the gradients fails (rows after the first are garbage)"
# causes = [
#   "wrong stride",
#   "scalar out of range",
#   "index out of range",
#   "sentinel consumed",
#   "missing tail mask",
#   "off by one",
#   "buffer too small",
# ]
# kernels = ["ce_backward"]
# arguments = ["grad_ptr", "grad_stride"]
# lines = [
#   "g = tl.load(grad_ptr + row * grad_stride)",
#   "grad_stride = 1 if grad.numel() > 1 else 0",
#   "ce_backward[(x.shape[0],)](x, y, lse, grad, dx, x.stride(0), grad_stride, x.shape[1],",
# ]
# fix = 'stride|grad_stride'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "grad_stride = 1 if grad.numel() > 1 else 0"
# fix_new = "grad_stride = grad.stride(0)"
# ///
