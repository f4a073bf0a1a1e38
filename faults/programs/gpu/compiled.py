"""A function under torch.compile; an index leads out of its tensor, past the checks of Inductor."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import torch._inductor.config

torch._inductor.config.assert_indirect_indexing = False


@torch.compile
def pick(x, ids):
    return x[ids] * 2 + 1


def main():
    x = torch.randn(1000, 64, device="cuda")
    ids = torch.arange(512, device="cuda")
    ids[300] = 1 << 36
    print(pick(x, ids).sum().item())


main()

# /// truth
# causes = ["index out of range"]
# kernels = ["triton_"]
# arguments = ["ids", "in_ptr0"]
# lines = ["x[ids] * 2 + 1"]
# fix = 'inside'
# options = []
# needs_gpu = true
# ///
