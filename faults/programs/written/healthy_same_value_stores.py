"""Many lanes and programs set the same flag to the same value."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def flag_rows(x_ptr, bad_ptr, any_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=0.0)
    nonfinite = (x != x) | (tl.abs(x) == float("inf"))
    zero = tl.zeros((BLOCK,), dtype=tl.int32)
    # several lanes write a 1 to the same place: the order does not matter
    tl.store(bad_ptr + row + zero, zero + 1, mask=nonfinite)
    tl.store(any_ptr + zero, zero + 1, mask=nonfinite)


torch.manual_seed(0)
x = torch.randn(5, 70, device=DEV)
x[1, 3] = float("nan")
x[1, 4] = float("inf")
x[4, 66] = -float("inf")
bad = torch.zeros(5, dtype=torch.int32, device=DEV)
found = torch.zeros(1, dtype=torch.int32, device=DEV)
flag_rows[(5, triton.cdiv(70, 32))](x, bad, found, 70, BLOCK=32)
print("rows with a non-finite value:", bad.nonzero().flatten().tolist())
assert bad.tolist() == [0, 1, 0, 0, 1] and found.item() == 1
print("ok")
