"""Triton kernel of `rope_write`: one program is one head of q, or of k and v, of one token."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.attention.kv_write_gpu import key_at, value_at
from hypocenter.kernels.attention.rope_gpu import angles, columns, rotate
from hypocenter.kernels.rowwise.norm_gpu import inverse_of
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def _norm_columns(x, weight_ptr, column, live, inverse):
    """Some columns of a head that is multiplied by `inverse`."""
    return x * inverse * tl.load(weight_ptr + column, mask=live, other=0.0)


@triton.jit
def _norm_head(start, a, b, first, second, live, d, unrotated, head_dim, norm_ptr, eps):
    """Both numbers of each pair normed, and the columns that do not turn."""
    x = tl.load(start + d, mask=d < head_dim, other=0.0)
    inverse = inverse_of(x, head_dim, eps)
    a = _norm_columns(a, norm_ptr, first, live, inverse)
    b = _norm_columns(b, norm_ptr, second, live, inverse)
    return a, b, _norm_columns(x, norm_ptr, d, unrotated, inverse)


@triton.jit
def rope_write_kernel(
    q_ptr, k_ptr, v_ptr, counts_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, k_cache_ptr,
    v_cache_ptr, q_norm_ptr, k_norm_ptr, eps, num_heads, num_kv_heads, head_dim, half, block_size,
    value_pitch, q_stride, k_stride, v_stride, NORMS_Q: tl.constexpr, NORMS_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: q = rope(norm(q)) in place, and kv_write of rope(norm(k)) and v; norm is rms_norm
    of a head where it has a weight.
    Shapes: q f32 [num_tokens, >= num_heads * head_dim]; k and v f32 [num_tokens, >=
    num_kv_heads * head_dim]; positions and slots i32 [num_tokens]; cos and sin f32
    [num_positions, half]; q_norm and k_norm f32 [head_dim]; counts i32 [2]; k_cache
    [num_blocks, num_kv_heads, head_dim, block_size] and v_cache [num_blocks, num_kv_heads,
    block_size, value_pitch], f16 or f32.
    Source: Su et al., arXiv 2104.09864.
    """
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    pair = tl.arange(0, PAIRS)
    live = pair < half
    cos, sin = angles(positions_ptr, cos_ptr, sin_ptr, token, pair, half, WIDE)
    first, second = columns(pair, half, NEIGHBOURS)
    d = tl.arange(0, BLOCK)
    unrotated = (d >= 2 * half) & (d < head_dim)
    if head < num_heads:
        q_start = q_ptr + as_offset(token, WIDE) * q_stride + head * head_dim
        a = tl.load(q_start + first, mask=live, other=0.0)
        b = tl.load(q_start + second, mask=live, other=0.0)
        if NORMS_Q:
            a, b, q = _norm_head(
                q_start, a, b, first, second, live, d, unrotated, head_dim, q_norm_ptr, eps
            )
            tl.store(q_start + d, q, mask=unrotated)
        a, b = rotate(a, b, cos, sin)
        tl.store(q_start + first, a, mask=live)
        tl.store(q_start + second, b, mask=live)
    else:
        head -= num_heads
        slot = as_offset(tl.load(slots_ptr + token), WIDE)
        k_start = k_ptr + as_offset(token, WIDE) * k_stride + head * head_dim
        a = tl.load(k_start + first, mask=live, other=0.0)
        b = tl.load(k_start + second, mask=live, other=0.0)
        if NORMS_K:
            a, b, k = _norm_head(
                k_start, a, b, first, second, live, d, unrotated, head_dim, k_norm_ptr, eps
            )
        else:
            k = tl.load(k_start + d, mask=unrotated, other=0.0)
        a, b = rotate(a, b, cos, sin)
        first_at = key_at(slot, head, first, num_kv_heads, head_dim, block_size)
        second_at = key_at(slot, head, second, num_kv_heads, head_dim, block_size)
        tl.store(k_cache_ptr + first_at, a.to(k_cache_ptr.dtype.element_ty), mask=live)
        tl.store(k_cache_ptr + second_at, b.to(k_cache_ptr.dtype.element_ty), mask=live)
        k_at = key_at(slot, head, d, num_kv_heads, head_dim, block_size)
        tl.store(k_cache_ptr + k_at, k.to(k_cache_ptr.dtype.element_ty), mask=unrotated)
        v_start = v_ptr + as_offset(token, WIDE) * v_stride + head * head_dim
        v = tl.load(v_start + d, mask=d < head_dim, other=0.0)
        v_at = value_at(slot, head, d, num_kv_heads, block_size, value_pitch)
        tl.store(v_cache_ptr + v_at, v.to(v_cache_ptr.dtype.element_ty), mask=d < head_dim)


def launch_plain(
    plan: BoundPlan, q: Tensor, cos: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads: int
) -> None:
    """Append rope_write, by which no head is normed."""
    launch(plan, q, cos, k_cache, v_cache, num_heads, None, None, 1.0)


def launch(
    plan: BoundPlan,
    q: Tensor,
    cos: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Append rope_write for every head and KV head of every token of the bucket."""
    _, num_kv_heads, head_dim, block_size = k_cache.shape
    half = cos.shape[1]
    plan.add_gpu(
        rope_write_kernel,
        grid=(q.shape[0], num_heads + num_kv_heads),
        # Without norms the pointers are never used; Triton wants some all the same.
        q_norm_ptr=q_norm or q,
        k_norm_ptr=k_norm or q,
        eps=eps,
        num_kv_heads=num_kv_heads,
        half=half,
        block_size=block_size,
        value_pitch=v_cache.shape[3],
        NORMS_Q=q_norm is not None,
        NORMS_K=k_norm is not None,
        PAIRS=triton.next_power_of_2(half),
        BLOCK=triton.next_power_of_2(head_dim),
        # As in rope and rms_norm, whose bits these are.
        enable_fp_fusion=False,
    )
