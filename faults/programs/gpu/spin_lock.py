"""A spin lock that nobody releases."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def spin(lock_ptr, out_ptr):
    v = tl.load(lock_ptr, volatile=True)
    while v == 0:
        v = tl.load(lock_ptr, volatile=True)
    tl.store(out_ptr, v)


def main():
    lock = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    spin[(1,)](lock, out)
    torch.cuda.synchronize()
    print(out.item())


main()

# /// truth
# causes = ["endless loop"]
# kernels = ["spin"]
# lines = ["v == 0"]
# fix = 'lock|release|end|loop|while|wait'
# options = ["--deadline", "15"]
# needs_gpu = true
# ///
