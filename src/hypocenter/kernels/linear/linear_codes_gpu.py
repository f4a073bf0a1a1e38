"""Triton kernel of `linear` for weights of block types and few rows: f16 by the matrix units.

A weight is code times scale (plus minimum), rounded to f16 once, and x is rounded to f16. Both are
multiplied exactly and added in f32 by the matrix units, 16 columns at a time. The units of columns
lie in eight chains, each a stretch of the row; a chain adds its columns in order, and the chains
are added in order. The kernel for more rows (`linear_codes_many_gpu.py`) keeps to that, so results
are equal in every bit. That the matrix unit adds alike in every instruction is seen on hardware
only (`benchmarks/gpu_ops.py` looks).

On NVIDIA's GPUs each warp has a chain, and speaks to its matrix unit itself (`lanes_gpu.py`).
Elsewhere chains lie side by side in one product, of which the parts that belong together count.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.lanes_gpu import by_warps, fold_chains
from hypocenter.kernels.linear.unpack_gpu import unit_weights
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs
from hypocenter.kernels.weights.gpu_layout import CHAINS

_CHAINS = tl.constexpr(CHAINS)


@triton.jit
def _side_by_side(
    x_ptr, words_ptr, scales_ptr, minima_ptr, tile, first, num_live, num_units, x_stride,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    ON_NVIDIA: tl.constexpr, WIDE: tl.constexpr, IS_FRAGMENTS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, ROWS]: all chains' weights times all chains' x, of which like chains count."""
    COLUMNS: tl.constexpr = 16 * PER_WORD
    HALVES: tl.constexpr = 2 if OUTPUTS > 8 else 1  # of sixteen outputs
    NUM: tl.constexpr = _CHAINS * OUTPUTS // 8
    per_chain = (num_units + _CHAINS - 1) // _CHAINS
    eight = tl.arange(0, NUM)
    chain = eight // HALVES % _CHAINS
    row = tile * (OUTPUTS // 8) + eight // (_CHAINS * HALVES) * HALVES + eight % HALVES
    units = as_offset(row, WIDE) * num_units
    column, lane = tl.arange(0, COLUMNS), tl.arange(0, _CHAINS * ROWS)
    if IS_FRAGMENTS:  # the column that lies where this one does in order
        in32 = column % 32
        column += in32 % 16 // 2 % 4 * 8 + in32 // 16 * 4 + in32 % 16 // 8 * 2 + in32 % 2 - in32
    x_row = as_offset(tl.maximum(tl.minimum(first + lane % ROWS, num_live - 1), 0), WIDE)
    x = x_ptr + (x_row * x_stride)[None, :] + column[:, None]
    acc = tl.zeros([NUM * 8, _CHAINS * ROWS], tl.float32)
    for step in tl.range(0, per_chain, num_stages=STAGES):
        unit = chain * per_chain + step
        weights = unit_weights(
            words_ptr,
            scales_ptr,
            minima_ptr,
            units + unit,
            unit < num_units,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            ON_NVIDIA,
            NUM,
        )
        x_unit = lane // ROWS * per_chain + step
        values = tl.load(
            x + (x_unit * COLUMNS)[None, :], mask=(x_unit < num_units)[None, :], other=0.0
        )
        acc = tl.dot(weights, values, acc)
    acc = tl.reshape(acc, (NUM // (_CHAINS * HALVES), _CHAINS, HALVES * 8, _CHAINS, ROWS))
    one = tl.arange(0, _CHAINS)
    alike = one[None, :, None, None, None] == one[None, None, None, :, None]
    acc = tl.permute(tl.sum(tl.where(alike, acc, 0.0), axis=3), (0, 2, 3, 1))
    return fold_chains(tl.reshape(acc, (OUTPUTS, ROWS, 2, 2, 2)))


@triton.jit
def _store(
    row_scales_ptr, bias_ptr, out_ptr, out_stride, factor, total, rows, outputs, num_live,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    live = rows < num_live
    total *= tl.load(row_scales_ptr + rows, mask=live, other=0.0) * factor
    store_outputs(
        out_ptr, rows, outputs, out_stride, total, bias_ptr, live, HAS_BIAS, ACCUMULATE, WIDE
    )


@triton.jit
def few_outputs(
    x_ptr, row_scales_ptr, live_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, factor, tile, first, num_units, x_stride, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, IS_FRAGMENTS: tl.constexpr, IS_EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for the rows from `first` on, as many as live_ptr says.

    By warps, UNITS of columns are asked for at once, of which a chain has a multiple.
    A kernel that has waited for the launch before it gives no OVERLAPS.
    """
    if ON_NVIDIA and IS_FRAGMENTS:
        total, above, num_live = by_warps(
            x_ptr,
            live_ptr,
            words_ptr,
            scales_ptr,
            minima_ptr,
            tile,
            first,
            num_units,
            x_stride,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            OVERLAPS,
            WIDE,
            IS_EVEN,
            ROWS,
            STAGES,
            UNITS,
        )
        outputs = tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, 2)[None, None, None, :]
        pair = tl.arange(0, 4)[None, :, None, None]
        rows = first + 2 * pair + tl.arange(0, 2)[None, None, :, None]
        if ROWS == 16:
            _store(
                row_scales_ptr,
                bias_ptr,
                out_ptr,
                out_stride,
                factor,
                above,
                rows + 8,
                tile * OUTPUTS + outputs,
                num_live,
                HAS_BIAS,
                ACCUMULATE,
                WIDE,
            )
    else:
        follow(OVERLAPS)
        num_live = first + tl.load(live_ptr)
        total = _side_by_side(
            x_ptr,
            words_ptr,
            scales_ptr,
            minima_ptr,
            tile,
            first,
            num_live,
            num_units,
            x_stride,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            ON_NVIDIA,
            WIDE,
            IS_FRAGMENTS,
            OUTPUTS,
            ROWS,
            STAGES,
        )
        rows, outputs = first + tl.arange(0, ROWS)[None, :], tl.arange(0, OUTPUTS)[:, None]
    _store(
        row_scales_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        factor,
        total,
        rows,
        tile * OUTPUTS + outputs,
        num_live,
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )


@triton.jit(do_not_specialize=["count", "num_tiles", "num_tiles_2"])
def linear_codes_few_kernel(
    x_ptr, row_scales_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, factor, words_2_ptr, scales_2_ptr, minima_2_ptr, bias_2_ptr, out_2_ptr,
    out_2_stride, factor_2, words_3_ptr, scales_3_ptr, minima_3_ptr, bias_3_ptr, out_3_ptr,
    out_3_stride, factor_3, num_tiles, num_tiles_2, count, num_units, x_stride,
    NUM_WEIGHTS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    IS_FRAGMENTS: tl.constexpr, IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Formula: out (+)= x @ weight.T (+ bias) for few rows, with weight = scale (code - ZERO) +
    minimum, of one weight or up to three.
    Shapes: x f16 [num_rows, k padded to 128]; row_scales f32 [num_rows]; counts i32 [2]; words
    i32, scales and minima f16, packed as in `gpu_layout.py`; bias f32 [n]; out f32 [num_rows,
    >= n]; of the others words_2, scales_2, minima_2, bias_2, out_2, words_3, scales_3,
    minima_3, bias_3 and out_3.
    """
    tile, live_ptr = tl.program_id(0), counts_ptr + count
    # Each weight has code of its own: guarded, an access is held against that weight alone.
    if NUM_WEIGHTS == 3:
        if tile >= num_tiles + num_tiles_2:
            few_outputs(
                x_ptr,
                row_scales_ptr,
                live_ptr,
                words_3_ptr,
                scales_3_ptr,
                minima_3_ptr,
                bias_3_ptr,
                out_3_ptr,
                out_3_stride,
                factor_3,
                tile - num_tiles - num_tiles_2,
                0,
                num_units,
                x_stride,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                HAS_BIAS,
                ACCUMULATE,
                ON_NVIDIA,
                OVERLAPS,
                WIDE,
                IS_FRAGMENTS,
                IS_EVEN,
                OUTPUTS,
                ROWS,
                STAGES,
                UNITS,
            )
            return
    if NUM_WEIGHTS > 1:
        if tile >= num_tiles:
            few_outputs(
                x_ptr,
                row_scales_ptr,
                live_ptr,
                words_2_ptr,
                scales_2_ptr,
                minima_2_ptr,
                bias_2_ptr,
                out_2_ptr,
                out_2_stride,
                factor_2,
                tile - num_tiles,
                0,
                num_units,
                x_stride,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                HAS_BIAS,
                ACCUMULATE,
                ON_NVIDIA,
                OVERLAPS,
                WIDE,
                IS_FRAGMENTS,
                IS_EVEN,
                OUTPUTS,
                ROWS,
                STAGES,
                UNITS,
            )
            return
    few_outputs(
        x_ptr,
        row_scales_ptr,
        live_ptr,
        words_ptr,
        scales_ptr,
        minima_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        factor,
        tile,
        0,
        num_units,
        x_stride,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        HAS_BIAS,
        ACCUMULATE,
        ON_NVIDIA,
        OVERLAPS,
        WIDE,
        IS_FRAGMENTS,
        IS_EVEN,
        OUTPUTS,
        ROWS,
        STAGES,
        UNITS,
    )
