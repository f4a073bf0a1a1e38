"""Pointers kept as numbers in a tensor; the memory of one was given back to the driver."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def via(ptrs_ptr, out_ptr, D: tl.constexpr):
    p = tl.load(ptrs_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    d = tl.arange(0, D)
    tl.store(out_ptr + tl.program_id(0) * D + d, tl.load(p + d))


def main():
    blocks = [torch.randn(1 << 24, device="cuda") for _ in range(4)]
    ptrs = torch.tensor([b.data_ptr() for b in blocks], device="cuda")
    out = torch.empty(4, 1024, device="cuda")
    del blocks[2]
    torch.cuda.empty_cache()
    via[(4,)](ptrs, out, D=1024)
    print(out.sum().item())


main()

# /// truth
# causes = ["wild pointer", "use after free"]
# kernels = ["via"]
# arguments = ["ptrs_ptr"]
# lines = ["tl.load(p + d)"]
# fix = 'keep|alive|free|address|pointer|entry'
# options = []
# needs_gpu = true
# ///
