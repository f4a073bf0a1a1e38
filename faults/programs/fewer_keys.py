"""Attention of each query to all keys; there are fewer keys than the kernel was told.

With `right` it was told how many.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def attend(q_ptr, k_ptr, v_ptr, out_ptr, num_keys, scale, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    query, column = tl.program_id(0), tl.arange(0, HEAD)
    q = tl.load(q_ptr + query * HEAD + column)
    most, total, acc = -float("inf"), 0.0, tl.zeros([HEAD], tl.float32)
    for start in range(0, num_keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        live = key < num_keys
        at = key[:, None] * HEAD + column[None, :]
        k = tl.load(k_ptr + at, mask=live[:, None], other=0.0)
        s = tl.where(live, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
        now = tl.maximum(most, tl.max(s, axis=0))
        p, fade = tl.exp(s - now), tl.exp(most - now)
        v = tl.load(v_ptr + at, mask=live[:, None], other=0.0)
        acc = acc * fade + tl.sum(p[:, None] * v, axis=0)
        total, most = total * fade + tl.sum(p, axis=0), now
    tl.store(out_ptr + query * HEAD + column, acc / total)


def main(right):
    q = torch.ones(4, 32, device=DEVICE)
    k, v = torch.ones(50, 32, device=DEVICE), torch.ones(50, 32, device=DEVICE)
    out = torch.zeros(4, 32, device=DEVICE)
    attend[(4,)](q, k, v, out, 50 if right else 64, 0.2, HEAD=32, BLOCK=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "index out of range",
#   "sentinel consumed",
# ]
# kernels = ["attend"]
# arguments = ["k_ptr", "v_ptr", "num_keys"]
# lines = ["tl.load(k_ptr"]
# fix = 'num_keys|50|rows|mask'
# ///
