"""A program of anybody's with one defect, by which `hypo doctor --self-test` looks at itself.

One index lies far outside of its table. It knows nothing of hypocenter and is never imported.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def take_rows(ids_ptr, table_ptr, out_ptr, num_ids, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    index = tl.load(ids_ptr + row)
    tl.store(out_ptr + row * WIDTH + column, tl.load(table_ptr + index * WIDTH + column))


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.arange(90, device=device)
    ids[70] = 2**40
    table = torch.ones(100, 16, device=device)
    out = torch.zeros(90, 16, device=device)
    take_rows[(90,)](ids, table, out, 90, WIDTH=16)
    print(out.sum().item())
