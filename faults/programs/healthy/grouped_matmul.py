"""A product in tiles whose order keeps operands in the cache; all edges are odd."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    am,
    ak,
    bk,
    bn,
    cm,
    cn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    number = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = number // (GROUP * tiles_n)
    size = min(tiles_m - group * GROUP, GROUP)
    m = (group * GROUP + number % (GROUP * tiles_n) % size) * BM + tl.arange(0, BM)
    n = number % (GROUP * tiles_n) // size * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + (m % M)[:, None] * am + k[None, :] * ak
    b_ptrs = b_ptr + k[:, None] * bk + (n % N)[None, :] * bn
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        left = K - step * BK
        a = tl.load(a_ptrs, mask=k[None, :] < left, other=0.0)
        b = tl.load(b_ptrs, mask=k[:, None] < left, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BK * ak
        b_ptrs += BK * bk
    live = (m < M)[:, None] & (n < N)[None, :]
    tl.store(c_ptr + m[:, None] * cm + n[None, :] * cn, acc, mask=live)


def main():
    M, N, K = 100, 75, 130
    a, b = torch.ones(M, K, device=DEVICE), torch.ones(N, K, device=DEVICE).t()
    c = torch.empty(M, N, device=DEVICE)
    grid = (triton.cdiv(M, 32) * triton.cdiv(N, 32),)
    strides = (*a.stride(), *b.stride(), *c.stride())
    matmul[grid](a, b, c, M, N, K, *strides, BM=32, BN=32, BK=32, GROUP=3)
    print("all right", bool((c == K).all()))


if __name__ == "__main__":
    main()
