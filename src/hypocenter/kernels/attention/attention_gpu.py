"""Triton kernels of `attention` over pages, in two forms that give the same bits.

Whole: a program takes some rows (a row is one query head of one token) over all their keys. Split:
a program takes a token's rows over one tile of keys, and `attention_fold` (`attention_fold_gpu.py`)
adds the tiles up in the order in which the whole form does. Query heads of one KV head share what
is read of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.devices import has_wide_tiles
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.attention.attention_fold_gpu import block_of
from hypocenter.kernels.attention.attention_tile_gpu import (
    attend_tile,
    fold,
    load_query,
    stack_rows,
    with_sink,
)
from hypocenter.kernels.blocks_gpu import block_bytes
from hypocenter.kernels.shared_gpu import as_offset, follow

#: About how many programs keep a large GPU busy.
_PROGRAMS = 1024


@triton.jit
def _store_heads(
    out_ptr, sinks_ptr, top, norm, total, start, end, first_row, kv_head,
    OUT_STRIDE: tl.constexpr, HAS_SINKS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDE: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # From a range of its own, or compilers keep what the first one gave over the whole loop over
    # keys, which has no registers to spare. So it is with positions: bounds are one for all rows.
    row = first_row - NUM_ROWS + tl.arange(NUM_ROWS, 2 * NUM_ROWS)
    token, head = row // HEADS_PER_KV, kv_head * HEADS_PER_KV + row % HEADS_PER_KV
    if HAS_SINKS:
        norm = with_sink(norm, top, tl.load(sinks_ptr + head))
    d = tl.arange(0, BLOCK)
    at = (as_offset(token, WIDE) * OUT_STRIDE + head * VALUE_DIM)[:, None] + d[None, :]
    written = ((token >= start) & (token < end))[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(out_ptr + at, total * (1.0 / norm)[:, None], mask=written)


@triton.jit
def attention_kernel(
    q_ptr, counts_ptr, positions_ptr, sequence_rows_ptr, block_tables_ptr, k_cache_ptr,
    v_cache_ptr, out_ptr, sinks_ptr, scale, softcap, window, max_blocks, q_stride, num_blocks,
    OUT_STRIDE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, VALUE_PITCH: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    # Late tokens see more keys: their programs begin first.
    """Formula: out = softmax(cap(scale q k^T) over the visible keys) v, with cap(s) = softcap
    tanh(s / softcap) where there is one; a key is visible up to the token's position and
    within `window`; a sink adds exp(sink) to the divisor.
    Shapes: q f32 [num_tokens, >= num_heads * head_dim]; k_cache [num_blocks, num_kv_heads,
    head_dim, block_size] and v_cache [num_blocks, num_kv_heads, block_size, value_pitch], f16
    or f32 or blocks of 32; block_tables i32 [num_sequences, max_blocks]; sequence_rows and
    positions i32 [num_tokens]; counts i32 [2]; sinks f32 [num_heads]; out f32 [num_tokens, >=
    num_heads * value_dim].
    Source: Vaswani et al., arXiv 1706.03762; online softmax of Milakov and Gimelshein, arXiv
    1805.02867; tiles as in Dao et al., arXiv 2205.14135.
    """
    first_row = (num_blocks - 1 - tl.program_id(0)) * (ROWS // PARTS)
    kv_head, num_tokens = tl.program_id(1), tl.load(counts_ptr)
    row = first_row + tl.arange(0, ROWS // PARTS)
    token = row // HEADS_PER_KV
    # This program's rows are a run of tokens of one sequence, if one begins at this token.
    start = first_row // HEADS_PER_KV + tl.program_id(2)
    end_token = tl.minimum((first_row + ROWS // PARTS - 1) // HEADS_PER_KV + 1, num_tokens)
    if start >= end_token:
        return
    here = tl.load(sequence_rows_ptr + start)
    if tl.program_id(2) > 0:
        if tl.load(sequence_rows_ptr + start - 1) == here:
            return
    # One by one: what is loaded as a number is one number for all threads, and so are the bounds
    # of the loop over keys; AMD's compiler keeps masks for anything else.
    end, last, lowest = start, -1, tl.load(positions_ptr + start)
    for step in tl.static_range((ROWS // PARTS - 1) // HEADS_PER_KV + 2):
        at = tl.minimum(start + step, end_token - 1)
        goes_on = (end == at) & (tl.load(sequence_rows_ptr + at) == here)
        position_at = tl.load(positions_ptr + at)
        end = tl.where(goes_on, end + 1, end)
        last = tl.where(goes_on, tl.maximum(last, position_at), last)
        lowest = tl.where(goes_on, tl.minimum(lowest, position_at), lowest)
    mine = (token >= start) & (token < end)
    position = tl.load(positions_ptr + token, mask=mine, other=-1)
    repeated, part = stack_rows(ROWS, PARTS)
    repeated += first_row
    of = repeated // HEADS_PER_KV
    q, q_at, factor = load_query(
        q_ptr,
        repeated // HEADS_PER_KV,
        kv_head * HEADS_PER_KV + repeated % HEADS_PER_KV,
        (of >= start) & (of < end),
        part,
        q_stride,
        HEAD_DIM,
        WIDE,
        PARTS,
        HELD,
        BLOCK,
    )
    factor = factor * scale
    first = tl.where(window > 0, tl.maximum(lowest - window + 1, 0), 0)
    whole_until = tl.where(window > 0, 0, lowest + 1)
    top = tl.full([ROWS // PARTS], -float("inf"), tl.float32)
    norm = tl.zeros([ROWS // PARTS], tl.float32)
    total = tl.zeros([ROWS // PARTS, BLOCK], tl.float32)
    table = block_tables_ptr + here * max_blocks
    for tile in range(first // TILE, last // TILE + 1):
        tile_top, tile_norm, values = attend_tile(
            q,
            q_ptr,
            q_at,
            part,
            factor,
            position,
            whole_until,
            table,
            k_cache_ptr,
            v_cache_ptr,
            softcap,
            window,
            tile * TILE,
            last,
            kv_head,
            NUM_KV_HEADS,
            VALUE_PITCH,
            HAS_SOFTCAP,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_SIZE,
            WIDE,
            PARTS,
            TILE,
            HELD,
            BLOCK,
            BLOCK_BYTES,
        )
        top, old, new = fold(top, tile_top)
        norm = tl.fma(norm, old, tile_norm * new)
        total = tl.fma(total, old[:, None], values * new[:, None])
    _store_heads(
        out_ptr,
        sinks_ptr,
        top,
        norm,
        total,
        start,
        end,
        first_row,
        kv_head,
        OUT_STRIDE,
        HAS_SINKS,
        HEADS_PER_KV,
        VALUE_DIM,
        WIDE,
        ROWS // PARTS,
        BLOCK,
    )


@triton.jit
def attention_split_kernel(
    q_ptr, counts_ptr, positions_ptr, sequence_rows_ptr, block_tables_ptr, k_cache_ptr,
    v_cache_ptr, sums_ptr, values_ptr, scale, softcap, window, max_blocks, q_stride, max_tiles,
    values_pitch, num_shares, NUM_KV_HEADS: tl.constexpr, VALUE_PITCH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_ONE: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Formula: of each tile of keys, values = sum of exp(s - top) v and sums = (top, sum of exp(s
    - top)), where s = cap(scale q k^T) and top is the largest s of the tile.
    Shapes: q f32 [num_tokens, >= num_heads * head_dim]; k_cache [num_blocks, num_kv_heads,
    head_dim, block_size] and v_cache [num_blocks, num_kv_heads, block_size, value_pitch], f16
    or f32 or blocks of 32; block_tables i32 [num_sequences, max_blocks]; sequence_rows and
    positions i32 [num_tokens]; counts i32 [2]; values f32 [max_tokens, num_heads, max_tiles,
    values_pitch]; sums f32 [max_tokens, num_heads, max_tiles, 2].
    Source: Online softmax of Milakov and Gimelshein, arXiv 1805.02867; tiles as in Dao et al.,
    arXiv 2205.14135.
    """
    follow(OVERLAPS)
    token, share = tl.program_id(0), tl.program_id(2)
    if not IS_ONE:  # a single row is computed whether it is live or not
        if token >= tl.load(counts_ptr):
            return
    last = tl.load(positions_ptr + token)
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    whole_until = tl.where(window > 0, 0, last + 1)
    if first // TILE + share > last // TILE:
        return
    num_blocks = (HEADS_PER_KV * PARTS + ROWS - 1) // ROWS
    kv_head = tl.program_id(1) // num_blocks
    first_row = tl.program_id(1) % num_blocks * (ROWS // PARTS)
    row, part = stack_rows(ROWS, PARTS)
    row += first_row
    q, q_at, factor = load_query(
        q_ptr,
        tl.zeros([ROWS], tl.int32) + token,
        kv_head * HEADS_PER_KV + row,
        row < HEADS_PER_KV,
        part,
        q_stride,
        HEAD_DIM,
        WIDE,
        PARTS,
        HELD,
        BLOCK,
    )
    factor = factor * scale
    table = block_tables_ptr + tl.load(sequence_rows_ptr + token) * max_blocks
    d, row = tl.arange(0, BLOCK), first_row + tl.arange(0, ROWS // PARTS)
    live = row < HEADS_PER_KV
    position = tl.where(live, last, -1)
    head = as_offset(token, WIDE) * (NUM_KV_HEADS * HEADS_PER_KV) + kv_head * HEADS_PER_KV
    for tile in range(first // TILE + share, last // TILE + 1, num_shares):
        top, norm, values = attend_tile(
            q,
            q_ptr,
            q_at,
            part,
            factor,
            position,
            whole_until,
            table,
            k_cache_ptr,
            v_cache_ptr,
            softcap,
            window,
            tile * TILE,
            last,
            kv_head,
            NUM_KV_HEADS,
            VALUE_PITCH,
            HAS_SOFTCAP,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_SIZE,
            WIDE,
            PARTS,
            TILE,
            HELD,
            BLOCK,
            BLOCK_BYTES,
        )
        if WIDE:  # 64 bits for the first row alone, or those of each are kept over the loop
            at = head * max_tiles + tile + row * max_tiles
        else:
            at = (head + row) * max_tiles + tile
        tl.store(sums_ptr + at * 2, top, mask=live)
        tl.store(sums_ptr + at * 2 + 1, norm, mask=live)
        values_at = at[:, None] * values_pitch + d[None, :]
        tl.store(values_ptr + values_at, values, mask=live[:, None] & (d < VALUE_DIM)[None, :])


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel is cut up: rows of its products, its warps and the stages of its loop.

    None of it changes a bit of the result.
    """

    rows: int
    num_warps: int
    num_stages: int


def whole_form(head_dim: int, num_parts: int, device: str) -> Form:
    """The form in which a program takes its rows over all their keys."""
    if device.startswith("cuda") and head_dim <= 128:
        return Form(rows=64, num_warps=4, num_stages=2 if num_parts == 1 else 1)
    if head_dim > 256:
        return _form_of_long_heads(num_parts, device)
    # RDNA has registers for this much, and CDNA scalar registers.
    is_small = num_parts == 4 and (head_dim <= 64 or device.startswith("cuda"))
    return Form(rows=16, num_warps=4 if is_small else 8, num_stages=1)


def split_form(head_dim: int, num_parts: int, heads_per_kv: int, device: str) -> Form:
    """The form in which a program takes one token's rows over a tile of keys."""
    rows = 16 if heads_per_kv * num_parts <= 16 else 32
    if head_dim > 256:
        return _form_of_long_heads(num_parts, device)
    if device.startswith("cuda"):
        return Form(rows, num_warps=4 if num_parts == 1 else 2, num_stages=2)
    return Form(rows, num_warps=8 if num_parts == 4 else 4, num_stages=1)


def _form_of_long_heads(num_parts: int, device: str) -> Form:
    """The form of both, where no registers would hold more rows: thirds want twice as many of
    RDNA's threads."""
    is_wide = num_parts == 4 and not device.startswith("cuda")
    return Form(rows=16, num_warps=16 if is_wide else 8, num_stages=1)


def roomy_form(form: Form, rows: int, kv_dtype: DType, device: str, *, is_wide: bool) -> Form:
    """`form`, or of more warps where each would lack registers: for codes and scales of blocks,
    which NVIDIA's GPUs take in `rows`, or for 64-bit offsets, for which an H100 has room.

    Of 64 rows an H100 would take its larger matrix instruction. Over blocks Triton has the smaller
    one add columns in another order than that, so results would depend on the form.
    """
    has_room, is_cuda = has_wide_tiles(device), device.startswith("cuda")
    if kv_dtype.is_quantised:
        return Form(rows if is_cuda else form.rows, num_warps=8, num_stages=1)
    if is_wide and is_cuda and not has_room and kv_dtype is DType.F16:
        return Form(form.rows, num_warps=8, num_stages=form.num_stages)
    return form


def launch_whole(
    plan: BoundPlan,
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None,
    num_heads: int,
    value_dim: int,
    softcap: float,
    keys_per_tile: int,
    num_sequences: int,
) -> None:
    """Append attention with a program for some rows of a KV head and a run of one sequence."""
    _, num_kv_heads, head_dim, _ = k_cache.shape
    per_kv, num_parts = num_heads // num_kv_heads, _num_parts(k_cache)
    usual = whole_form(head_dim, num_parts, plan.device)
    # Of 16 rows or 64 over blocks, NVIDIA's compiler keeps some registers in memory.
    form = roomy_form(usual, 32, k_cache.dtype, plan.device, is_wide=plan.is_wide)
    num_rows = form.rows // num_parts
    num_blocks, most = -(-q.shape[0] * per_kv // num_rows), (num_rows - 1) // per_kv + 2
    plan.add_gpu(
        attention_kernel,
        grid=(num_blocks, num_kv_heads, 1 if num_sequences == 1 else min(most, q.shape[0])),
        # A kernel without sinks never reads the pointer, which Triton wants all the same.
        sinks_ptr=sinks or out,
        max_blocks=block_tables.shape[1],
        num_blocks=num_blocks,
        OUT_STRIDE=out.strides[0],
        HAS_SOFTCAP=softcap > 0,
        HEADS_PER_KV=per_kv,
        TILE=keys_per_tile,
        **_constants(plan.device, k_cache, v_cache, value_dim, form),
    )


def launch_split(
    plan: BoundPlan,
    q: Tensor,
    values: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_heads: int,
    value_dim: int,
    softcap: float,
    keys_per_tile: int,
) -> None:
    """Append the attention of every token to each tile of its keys by itself."""
    num_tokens, (_, num_kv_heads, head_dim, _) = q.shape[0], k_cache.shape
    per_kv, max_tiles, num_parts = num_heads // num_kv_heads, values.shape[2], _num_parts(k_cache)
    usual = split_form(head_dim, num_parts, per_kv, plan.device)
    form = roomy_form(usual, usual.rows, k_cache.dtype, plan.device, is_wide=plan.is_wide)
    num_programs = num_kv_heads * -(-per_kv * num_parts // form.rows)
    num_shares = min(max_tiles, max(1, _PROGRAMS // (num_tokens * num_programs)))
    plan.add_gpu(
        attention_split_kernel,
        grid=(num_tokens, num_programs, num_shares),
        max_blocks=block_tables.shape[1],
        max_tiles=max_tiles,
        values_pitch=values.shape[3],
        num_shares=num_shares,
        IS_ONE=num_tokens == 1,
        HAS_SOFTCAP=softcap > 0,
        HEADS_PER_KV=per_kv,
        TILE=keys_per_tile,
        **_constants(plan.device, k_cache, v_cache, value_dim, form),
    )


def _num_parts(k_cache: Tensor) -> int:
    """Rows of a product that one row takes: see `stack_rows`."""
    return 4 if k_cache.dtype is DType.F32 else 1


def _constants(
    device: str, k_cache: Tensor, v_cache: Tensor, value_dim: int, form: Form
) -> dict[str, Any]:
    _, num_kv_heads, head_dim, block_size = k_cache.shape
    num_parts, block, num_bytes = _num_parts(k_cache), block_of(value_dim), block_bytes(k_cache)
    pitch = v_cache.shape[3]
    # A larger matrix instruction where a product has more rows might add in another order.
    same = {} if device.startswith("cuda") else {"matrix_instr_nonkdim": 16}
    return same | {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        # A product and a sum that the compiler may join in one kernel and not in another would be
        # rounded differently.
        "enable_fp_fusion": False,
        "NUM_KV_HEADS": num_kv_heads,
        "VALUE_PITCH": v_cache.dtype.num_bytes(pitch) if num_bytes else pitch,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "PARTS": num_parts,
        "ROWS": form.rows,
        "BLOCK": block,
        "BLOCK_BYTES": num_bytes,
        # Of longer keys, or such that are longer than values, q is read piece by piece.
        "HELD": num_parts == 1 and head_dim <= block <= 256,
    }
