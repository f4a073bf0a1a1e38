"""hadamard against its reference in float64, and with the same bits on each device."""

from __future__ import annotations

import numpy as np
import pytest
from ops.kernel_forms import FORMS, use_form
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.device.copies import to_host
from hypocenter.kernels.rowwise import hadamard

EPS = 2.0**-24
NUM_ROWS, NUM_LIVE = 6, 5
#: The width of a row, and the columns that are multiplied together.
SHAPES = [(96, 32), (192, 64), (128, 128), (512, 256), (1024, 512)]
shapes = pytest.mark.parametrize(("width", "size"), SHAPES)


@pytest.fixture(params=FORMS, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def _x(width: int) -> Array:
    """Rows with one column that is much larger, as keys have."""
    x = np.random.default_rng(width).standard_normal((NUM_ROWS, width)).astype(np.float32)
    x[:, 7] *= 64
    return x


def _multiplied(x: Array, size: int) -> Array:
    given = rows_tensor("x", x, np.nan)
    launch(
        lambda p: hadamard.hadamard(p, given, counts(NUM_LIVE), width=x.shape[1], size=size),
        NUM_ROWS,
    )
    found = to_host(given)
    assert np.isnan(found[:, x.shape[1] :]).all()
    return np.array(found[:, : x.shape[1]])


@shapes
def test_rows_are_multiplied_by_the_matrix(width: int, size: int) -> None:
    x = _x(width)
    found, wanted = _multiplied(x, size), hadamard.reference(x, size)
    # A sum for each step, a product, and the factor, each of at most the sum of magnitudes.
    bound = (size.bit_length() + 1) * EPS * hadamard.sizes_of_sums(x, size)
    assert (np.abs(found - wanted)[:NUM_LIVE] <= bound[:NUM_LIVE]).all()
    np.testing.assert_array_equal(bits(found[NUM_LIVE:]), bits(x[NUM_LIVE:]), "rows that wait")


@shapes
def test_bits_are_those_of_sums_by_steps(width: int, size: int) -> None:
    """In numpy, so on each device they are the same."""
    x = _x(width)
    wanted = x.reshape(NUM_ROWS, -1, size)
    for step in (1 << bit for bit in range(size.bit_length() - 1)):
        a, b = np.moveaxis(wanted.reshape(NUM_ROWS, -1, size // (2 * step), 2, step), 3, 0)
        wanted = np.stack([a + b, a - b], axis=3).reshape(NUM_ROWS, -1, size)
    wanted = (wanted * (np.float32(1) / np.sqrt(np.float32(size)))).reshape(NUM_ROWS, width)
    found = _multiplied(x, size)
    np.testing.assert_array_equal(bits(found[:NUM_LIVE]), bits(wanted[:NUM_LIVE]))


def test_a_second_time_gives_the_row_back_and_products_stay() -> None:
    x = _x(128)
    once = _multiplied(x, 128)
    twice = _multiplied(once, 128)
    size = np.abs(x).max() * np.sqrt(128)
    assert np.abs(twice - x)[:NUM_LIVE].max() < 20 * EPS * size
    products, wanted = (y[:NUM_LIVE].astype(np.float64) @ y[:NUM_LIVE].T for y in (once, x))
    assert np.abs(products - wanted).max() < 40 * EPS * np.abs(wanted).max()
    assert np.abs(once[:NUM_LIVE]).max() < np.abs(x[:NUM_LIVE]).max() / 4, "it is spread"


def test_the_largest_size_that_fits_is_taken() -> None:
    assert [hadamard.size_for(n) for n in (32, 96, 128, 192, 512)] == [32, 32, 128, 64, 512]
    assert hadamard.size_for(576, 512) == hadamard.size_for(64, 512) == 64


@pytest.mark.parametrize(
    ("width", "size", "text"),
    [(96, 64, "whole stretches"), (96, 48, "power of two from 32 to 512")],
)
def test_stretches_that_do_not_fit_are_refused(width: int, size: int, text: str) -> None:
    with pytest.raises(LaunchRejected, match=text):
        _multiplied(_x(width), size)
