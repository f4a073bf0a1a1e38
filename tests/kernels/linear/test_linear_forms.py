"""The table of tiles: each fits the outputs of its weights and leaves no processor without work."""

from __future__ import annotations

import itertools

import pytest

from hypocenter.base.tensor import DType
from hypocenter.kernels.linear import linear_forms
from hypocenter.kernels.linear.linear_forms import codes_form, few_codes_form, float_form

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


def test_larger_tiles_are_taken_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "has_wide_tiles", lambda name: True)

    def size(rows: int, outputs: int) -> tuple[int, int]:
        return float_form(DType.F16, rows, [outputs], "cuda", accumulate=False)[:2]

    assert size(512, 14336) == (256, 128)
    assert size(512, 4096) == (128, 128)
    assert size(128, 4096) == (64, 64)
    assert size(2048, 1024) == (128, 128)
