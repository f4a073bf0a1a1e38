"""Which tiles `linear` takes on a GPU: by rows of a bucket, type and kind of GPU, as measured.

The measurements are in `benchmarks/results/` (README.md, "Products on an H100"). No form changes a
result. What was not measured, AMD's GPUs and NVIDIA's with little shared memory, takes tiles that
fit there without spilling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypocenter.base.tensor import DType
from hypocenter.device.devices import has_wide_tiles
from hypocenter.kernels.linear.operands import FEW_ROWS
from hypocenter.kernels.weights.gpu_layout import CHAINS, UNITS


class TileForm(NamedTuple):
    """A program's outputs and rows, its warps, what it takes in a step, and steps under way."""

    outputs: int
    rows: int
    num_warps: int
    steps: int
    stages: int


#: Processors of an H100 and an H200.
_PROCESSORS = 132
#: Programs from which on an H100's 132 processors are busy enough for larger tiles.
_ENOUGH = 112
#: Rows up to which each form is taken, with room for large tiles; then the largest of which there
#: are enough programs.
_WIDE_FLOATS = (
    (1, TileForm(16, 1, 1, 2, 6)),
    (16, TileForm(64, 16, 4, 2, 5)),
    (32, TileForm(64, 32, 4, 2, 4)),
    (64, TileForm(64, 64, 4, 1, 6)),
)
_WIDEST_FLOATS = (
    TileForm(256, 128, 8, 1, 4),
    TileForm(128, 128, 4, 1, 4),
    TileForm(128, 64, 4, 1, 4),
)
#: Where what was there is added, the largest have no registers for it.
_WIDEST_ADDED = (TileForm(256, 64, 8, 1, 4), TileForm(128, 64, 4, 1, 4))
_SMALLEST_FLOATS = TileForm(64, 64, 4, 1, 5)
#: F32, which has no matrix units: up to so many rows, then more.
_NO_UNITS = ((1, TileForm(8, 1, 8, 16, 1)), (16, TileForm(4, 16, 8, 8, 1)))
_NO_UNITS_MANY = TileForm(16, 16, 4, 2, 1)
#: The same for codes, of which a processor takes two programs at a time.
_WIDE_CODES = (
    (16, TileForm(64, 16, 4, 1, 5)),
    (32, TileForm(64, 32, 4, 1, 4)),
    (64, TileForm(64, 64, 4, 1, 4)),
)
_WIDEST_CODES = TileForm(64, 128, 4, 1, 3)
#: Outputs from which on tiles of 64 keep an H100 busy.
_MANY_OUTPUTS = 8192


def float_form(
    dtype: DType, num_rows: int, num_outputs: Sequence[int], device: str, *, accumulate: bool
) -> TileForm:
    """The tile for weights of `num_outputs`, each a multiple of 64, that share a launch."""
    is_cuda = device.startswith("cuda")
    if dtype is DType.F32:
        # Four warps of RDNA have no registers for so many chains.
        many = _NO_UNITS_MANY if is_cuda else _NO_UNITS_MANY._replace(num_warps=8)
        return next((form for most, form in _NO_UNITS if num_rows <= most), many)
    few_rows = 1 if is_cuda and num_rows == 1 else 16
    if is_cuda and has_wide_tiles(device):
        for most, form in _WIDE_FLOATS:
            if num_rows <= most:
                # Each of several weights has stages of its own.
                return form if len(num_outputs) == 1 else form._replace(stages=3)
        for form in _WIDEST_ADDED if accumulate else _WIDEST_FLOATS:
            num_tiles = sum(num_outputs) // form.outputs * -(-num_rows // form.rows)
            if num_tiles >= _ENOUGH and not any(size % form.outputs for size in num_outputs):
                return form
        return _SMALLEST_FLOATS
    if num_rows <= 16:
        return TileForm(16, few_rows, 1, 2, 3 if is_cuda else 2)
    return TileForm(64, 64, 4, 1, 3 if is_cuda else 2)


def few_codes_form(num_rows: int, num_outputs: int, *, reads_fragments: bool) -> TileForm | None:
    """The tile for codes of few rows; None where those of many are faster, or rows are more."""
    if num_rows > FEW_ROWS:
        return None
    if reads_fragments:
        if num_rows > 8 and num_outputs >= _MANY_OUTPUTS:
            return None
        return TileForm(16, 8 if num_rows <= 8 else 16, CHAINS, 1, 1)
    # Chains side by side take registers for eight times as many rows.
    return (
        TileForm(16, max(2, 1 << (num_rows - 1).bit_length()), 8, 1, 2) if num_rows <= 4 else None
    )


def units_asked(
    dtype: DType, num_rows: int, num_outputs: int, chain_units: int, device: str
) -> tuple[int, int]:
    """Units of columns that a warp of few rows asks for at once, of which `chain_units`, those of
    a chain, are a multiple; and how many times as many are under way, 1 or 2.

    More of them take registers, so fewer programs run on a processor. What fits two programs on
    each has the registers for units ahead. Codes of bytes that have more programs read memory as
    fast as a copy by one unit at a time.
    """
    units = UNITS[dtype]
    if num_rows > 8 or not has_wide_tiles(device) or chain_units % 2:
        return 1, 1
    num_programs = num_outputs // 16
    if num_programs <= 2 * _PROCESSORS:
        # Scales and minima of groups of 16 take as many registers as codes do.
        return (1 if units.has_minima and units.group == 16 else 2), 2
    if units.codes_per_word == 4:
        return 1, 1
    is_wide = num_programs > 3 * _PROCESSORS and chain_units % 4 == 0
    return (4 if is_wide and units.has_minima and units.group == 32 else 2), 1


def codes_form(num_rows: int, num_outputs: int, device: str) -> TileForm:
    """The tile for codes of more rows."""
    if not has_wide_tiles(device):
        return TileForm(64, 16 if num_rows <= 16 else 32, 4, 1, 2)
    for most, form in _WIDE_CODES:
        if num_rows <= most:
            # Few outputs: more programs keep more processors busy.
            is_small = num_outputs < _MANY_OUTPUTS and form.rows == 64
            return form._replace(rows=32) if is_small else form
    return _WIDEST_CODES
