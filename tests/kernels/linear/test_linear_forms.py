"""The table of tiles: each fits the outputs of its weights and leaves no processor without work."""

from __future__ import annotations

import itertools

import pytest

from hypocenter.base.tensor import DType
from hypocenter.kernels.linear import linear_forms
from hypocenter.kernels.linear.linear_forms import (
    codes_form,
    few_codes_form,
    float_form,
    units_asked,
)
from hypocenter.kernels.weights.gpu_layout import UNITS

BUCKETS = tuple(1 << power for power in range(13))
OUTPUTS = (64, 192, 1024, 4096, 14336, 128256)


@pytest.fixture(params=["hip", "cuda", "cuda with wide tiles"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    is_wide = request.param.endswith("tiles")
    monkeypatch.setattr(linear_forms, "has_wide_tiles", lambda name: is_wide)
    return str(request.param).partition(" ")[0]


def test_a_tile_of_floats_ends_where_its_weight_ends(device: str) -> None:
    for dtype, rows, outputs, accumulate in itertools.product(
        (DType.F32, DType.F16, DType.BF16), BUCKETS, OUTPUTS, (False, True)
    ):
        form = float_form(dtype, rows, [outputs], device, accumulate=accumulate)
        assert outputs % form.outputs == 0
        assert form.rows >= min(rows, 16)
        if form.outputs > 64 or form.rows > 64:
            assert outputs // form.outputs * -(-rows // form.rows) >= 112


@pytest.mark.parametrize("reads_fragments", [False, True])
def test_a_tile_of_codes_ends_where_its_weight_ends(device: str, reads_fragments: bool) -> None:
    for rows, outputs in itertools.product(BUCKETS, OUTPUTS):
        form = few_codes_form(rows, outputs, reads_fragments=reads_fragments)
        if form is None:
            assert rows > (8 if reads_fragments else 4)
            form = codes_form(rows, outputs, device)
        else:  # one tile has all rows
            assert form.rows >= rows
        assert outputs % form.outputs == 0
        assert form.rows >= min(rows, 16)


@pytest.mark.parametrize("device", ["cuda with wide tiles"], indirect=True)
def test_units_are_asked_for_together_as_far_as_registers_go(device: str) -> None:
    asked = set()
    for dtype, rows, outputs, chain_units in itertools.product(
        [dtype for dtype, units in UNITS.items() if not units.is_float],
        (1, 8, 16), (*OUTPUTS, 6144, 28672), range(1, 15),
    ):  # fmt: skip
        units, stages = units_asked(dtype, rows, outputs, chain_units, device)
        assert chain_units % units == 0  # a warp asks for nothing behind its chain
        assert (units, stages) == (1, 1) or rows <= 8
        # Registers of a lane: codes of two rows, their scales and, as many, their minima.
        layout = UNITS[dtype]
        of_scales = layout.unit_columns // layout.group // 4 * (1 + layout.has_minima)
        held = units * stages * 2 * (4 + of_scales)
        assert held <= 64
        asked.add((units, stages))
    assert asked == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}


def test_units_are_asked_for_one_by_one_where_there_was_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_forms, "has_wide_tiles", lambda name: False)
    assert units_asked(DType.Q4_K, 1, 4096, 4, "cuda") == (1, 1)


def test_larger_tiles_are_taken_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "has_wide_tiles", lambda name: True)

    def size(rows: int, outputs: int) -> tuple[int, int]:
        return float_form(DType.F16, rows, [outputs], "cuda", accumulate=False)[:2]

    assert size(512, 14336) == (256, 128)
    assert size(512, 4096) == (128, 128)
    assert size(128, 4096) == (64, 64)
    assert size(2048, 1024) == (128, 128)
