"""Which tiles `linear` takes on a GPU: by rows of a bucket, type and kind of GPU, as measured.

The measurements are in `benchmarks/results/` (README.md, "Products on an H100"). No form changes a
result. What was not measured, AMD's GPUs and NVIDIA's with little shared memory, takes tiles that
fit there without spilling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypocenter.device.devices import has_wide_tiles
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.tensor import DType


class TileForm(NamedTuple):
    """A program's outputs and rows, its warps, what it takes in a step, and steps under way."""

    outputs: int
    rows: int
    num_warps: int
    steps: int
    stages: int


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


def float_form(
    dtype: DType, num_rows: int, num_outputs: Sequence[int], device: str, *, accumulate: bool
) -> TileForm:
    """The tile for weights of `num_outputs`, each a multiple of 64, that share a launch."""
    is_cuda = device.startswith("cuda")
    few_rows = 1 if is_cuda and num_rows == 1 else 16
    if dtype is DType.F32:  # no matrix units
        return TileForm(16, few_rows, 4, 1, 2) if num_rows <= 16 else TileForm(64, 32, 8, 1, 2)
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


def some_codes_form(dtype: DType, num_rows: int, device: str) -> TileForm:
    """The tile for codes of some rows."""
    if not device.startswith("cuda"):
        return TileForm(16, 16, 8, 1, 2)
    if not has_wide_tiles(device):
        return TileForm(16, 16, 4, 1, 2)
    # Two sums a group of 32 columns leave no registers for more rows.
    is_small = num_rows <= 16 or UNITS[dtype].group == 16
    return TileForm(32, 16 if is_small else 32, 8, 1, 2)


def many_codes_form(dtype: DType, num_rows: int, num_outputs: int, device: str) -> TileForm:
    """The tile for codes of many rows, which a launch has for one weight of `num_outputs`."""
    layout = UNITS[dtype]
    is_plain = layout.group == 32 and not layout.has_minima
    if not has_wide_tiles(device):
        return TileForm(64, 32, 4, 1, 2)
    if num_rows <= 64 or layout.group == 16:
        return TileForm(64, 64, 4, 1, 3)
    is_whole = padded_rows(num_outputs) % 128 == 0
    if is_plain and layout.codes_per_word == 4 and num_rows >= 512 and is_whole:
        return TileForm(128, 128, 8, 1, 3)
    return TileForm(64, 128, 4, 1, 3) if is_plain else TileForm(64, 64, 4, 1, 3)
