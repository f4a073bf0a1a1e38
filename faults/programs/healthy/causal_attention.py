"""Attention with a running maximum; queries see the keys up to their own position."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, length, scale,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * length * HEAD
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.arange(0, HEAD)
    live = m[:, None] < length
    q = tl.load(q_ptr + head + m[:, None] * HEAD + column[None, :], mask=live, other=0.0)
    most = tl.full([BM], -float("inf"), tl.float32)
    total, acc = tl.zeros([BM], tl.float32), tl.zeros([BM, HEAD], tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM, BN):
        n = start + tl.arange(0, BN)
        at = head + n[:, None] * HEAD + column[None, :]
        k = tl.load(k_ptr + at, mask=n[:, None] < length, other=0.0)
        s = tl.where(m[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        now = tl.maximum(most, tl.max(s, axis=1))
        p, fade = tl.exp(s - now[:, None]), tl.exp(most - now)
        v = tl.load(v_ptr + at, mask=n[:, None] < length, other=0.0)
        acc = acc * fade[:, None] + tl.dot(p, v)
        total, most = total * fade + tl.sum(p, axis=1), now
    out_at = out_ptr + head + m[:, None] * HEAD + column[None, :]
    tl.store(out_at, acc / total[:, None], mask=live)


def main():
    q, k, v = (torch.randn(1, 3, 50, 32, device=DEVICE) for _ in range(3))
    out = torch.empty_like(q)
    attend[(4, 3)](q, k, v, out, 50, 32**-0.5, HEAD=32, BM=16, BN=16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    print("is close", bool((out - expected).abs().max() < 2e-2))


if __name__ == "__main__":
    main()
