"""Triton kernel of `linear` for weights of block types and many rows: f16 by the matrix units.

It gives the bits of `linear_codes_gpu.py`: the same numbers in the same chains, one after another.
A unit of weights becomes f16 once for all rows of a tile, in the registers that feed the matrix
units.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.unpack_gpu import unit_weights
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs
from hypocenter.kernels.weights.gpu_layout import CHAINS

_CHAINS = tl.constexpr(CHAINS)


@triton.jit
def _settle(acc, ON_NVIDIA: tl.constexpr):
    """acc, when the matrix units are done with it.

    They read weights from registers while a program goes on. Triton 3.6 lets it fill these anew
    before they have: without this results were wrong on an H100, in tiles of 256 threads.
    """
    if ON_NVIDIA:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        return acc


@triton.jit
def many_outputs(
    x_ptr, row_scales_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr, out_stride,
    factor, tile, first, num_live, num_units, x_stride, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for the rows of a tile, which end at num_live."""
    COLUMNS: tl.constexpr = 16 * PER_WORD
    NUM: tl.constexpr = OUTPUTS // 8
    rows = first + tl.arange(0, ROWS)
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    units = as_offset(tile * NUM + tl.arange(0, NUM), WIDE) * num_units
    x = x_ptr + (at_row * x_stride)[None, :] + tl.arange(0, COLUMNS)[:, None]
    per_chain = (num_units + _CHAINS - 1) // _CHAINS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for unit in tl.range(0, num_units, num_stages=STAGES):
        weights = unit_weights(
            words_ptr,
            scales_ptr,
            minima_ptr,
            units + unit,
            units + unit >= 0,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            ON_NVIDIA,
            NUM,
        )
        acc = _settle(tl.dot(weights, tl.load(x + unit * COLUMNS), acc), ON_NVIDIA)
        if (unit % per_chain == per_chain - 1) | (unit == num_units - 1):
            _apart(ON_NVIDIA)
            total += acc
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total *= (tl.load(row_scales_ptr + at_row) * factor)[None, :]
    # From ranges of their own, or compilers keep what the first ones gave over the whole loop.
    rows = first - ROWS + tl.arange(ROWS, 2 * ROWS)
    outputs = (tile - 1) * OUTPUTS + tl.arange(OUTPUTS, 2 * OUTPUTS)
    store_outputs(
        out_ptr,
        rows[None, :],
        outputs[:, None],
        out_stride,
        total,
        bias_ptr,
        (rows < num_live)[None, :],
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )


@triton.jit
def _apart(ON_NVIDIA: tl.constexpr):
    """A branch that is seldom taken: it keeps compilers from computing it always, to select."""
    if ON_NVIDIA:
        tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["count"])
def linear_codes_kernel(
    x_ptr, row_scales_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, factor, count, num_units, x_stride, PER_WORD: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Formula: out (+)= x @ weight.T (+ bias), with weight = scale (code - ZERO) + minimum.
    Shapes: x f16 [num_rows, k padded to 128]; row_scales f32 [num_rows]; counts i32 [2]; words
    i32, scales and minima f16, packed as in `gpu_layout.py`; bias f32 [n]; out f32 [num_rows,
    >= n].
    """
    follow(OVERLAPS)
    # Programs side by side read the same weights.
    first = tl.program_id(0) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    many_outputs(
        x_ptr,
        row_scales_ptr,
        words_ptr,
        scales_ptr,
        minima_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        factor,
        tl.program_id(1),
        first,
        num_live,
        num_units,
        x_stride,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        HAS_BIAS,
        ACCUMULATE,
        ON_NVIDIA,
        WIDE,
        OUTPUTS,
        ROWS,
        STAGES,
    )
