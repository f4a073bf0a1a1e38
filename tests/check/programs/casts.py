"""A program that launches a kernel on what it computes under autocast: halves, as on a GPU."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN205
import torch
import triton
import triton.language as tl


@triton.jit
def halves(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(x_ptr.dtype.element_ty == tl.float16)
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0) * 2, mask=i < n)


class Twice(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x):
        y = torch.empty_like(x)
        halves[(1,)](x, y, x.numel(), BLOCK=64)
        return y


if __name__ == "__main__":
    x = torch.ones(5, 5, device="cuda")
    with torch.autocast("cuda"):
        product = x @ x
        assert (product.dtype, product.device.type) == (torch.float16, "cuda")
        assert torch.equal(Twice.apply(product), product * 2)
        assert Twice.apply(x).dtype == torch.float16  # cast by the function, not by a product
