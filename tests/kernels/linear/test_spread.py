"""What GPU products read of x where it is no codes: exact products of code and scale, and rounded
numbers."""

from __future__ import annotations

import kernel_launch
import numpy as np
import pytest
from kernel_launch import bits, counts, launch, random_rows, rows_tensor, weight_tensor

from hypocenter.device import copies, devices
from hypocenter.kernels.linear import quantise as quantise_op
from hypocenter.kernels.linear.operands import SUM_ROWS, Operands
from hypocenter.kernels.linear.quantise import prepare_operands, quantise, spread
from hypocenter.tensor import DType

NUM_ROWS, NUM_LIVE = 70, 67


@pytest.fixture(autouse=True)
def sim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device("sim:mi300x"))


def _numbers(width: int) -> np.ndarray:
    """Rows of many sizes, in each groups of many sizes; zeros, numbers that are none among them."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((NUM_ROWS, width)).astype(np.float32)
    sizes = rng.integers(-8, 9, (NUM_ROWS, -(-width // 32))).repeat(32, axis=1)[:, :width]
    x *= np.exp2(sizes + rng.integers(-60, 60, (NUM_ROWS, 1))).astype(np.float32)
    x[1], x[2, :32], x[3, 0], x[4, -1] = 0, 0, np.nan, np.inf
    return x


@pytest.mark.parametrize("width", [32, 130, 1100])
def test_code_times_scale_is_exact(width: int) -> None:
    x = _numbers(width)
    into = Operands.allocate([DType.Q4_K], NUM_ROWS, width, device="sim:mi300x")
    into = into.first(NUM_ROWS)
    assert into.spread is not None
    assert into.spread_scales is not None
    assert into.spread_sums is not None
    copies.to_device(into.spread, np.full(into.spread.shape, 77, np.uint16))
    given, live = rows_tensor("x", x, np.nan), counts(NUM_LIVE)

    def build(plan: object) -> None:
        quantise(plan, given, width, into, live)  # type: ignore[arg-type]
        spread(plan, into, width, live, with_sums=True)  # type: ignore[arg-type]

    launch(build, NUM_ROWS)
    codes, scales, sums = quantise_op.reference(x)
    # A group's largest code stays above 112: four bits of the scale cost an eighth at most.
    largest = np.abs(codes.reshape(NUM_ROWS, -1, 32)).max(axis=-1)
    assert largest[(scales > 0) & np.isfinite(scales)].min() >= 112
    exact = codes.reshape(NUM_ROWS, -1, 32) * scales[..., None].astype(np.float64)
    padded = codes.shape[1]
    found = copies.to_host(into.spread).view(np.float16)[:NUM_LIVE, :padded].astype(np.float64)
    # Of 16 columns [word, pair, even and odd] the pairs come first.
    found = found.reshape(NUM_LIVE, -1, 2, 4, 2).swapaxes(2, 3).reshape(NUM_LIVE, padded)
    down = copies.to_host(into.spread_scales)[:NUM_LIVE].astype(np.float64)
    np.testing.assert_array_equal(found * down[:, None], exact.reshape(NUM_ROWS, padded)[:NUM_LIVE])
    assert (copies.to_host(into.spread)[NUM_LIVE:] == 77).all()
    tiles = copies.to_host(into.spread_sums).reshape(
        -1, into.spread_sums.shape[1] // 3, 3, SUM_ROWS
    )
    by_row = tiles.transpose(0, 3, 1, 2).reshape(-1, *tiles.shape[1:3])[:NUM_LIVE, : padded // 32]
    halves = sums.reshape(NUM_ROWS, -1, 2)
    three = np.stack([halves[..., 0], halves[..., 1], halves.sum(axis=-1)], axis=-1)
    wanted = three * scales[..., None].astype(np.float64)
    np.testing.assert_array_equal(by_row * down[:, None, None], wanted[:NUM_LIVE])


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("width", [1, 130])
def test_rounded_numbers_are_the_nearest_ones(dtype: DType, width: int) -> None:
    x = np.nan_to_num(_numbers(width), nan=0, posinf=0)
    into = Operands.allocate([dtype], NUM_ROWS, width, device="sim:mi300x").first(NUM_ROWS)
    weight = weight_tensor(dtype, random_rows(dtype, 1, width), width)
    given = rows_tensor("x", x, np.nan)
    launch(lambda p: prepare_operands(p, given, [weight], into, counts(NUM_LIVE)), NUM_ROWS)
    made = into.rounded_for(dtype)
    assert made is not None
    assert into.row_scales is not None
    values = copies.to_host(made)
    if dtype is DType.F16:
        numbers = values.view(np.float16).astype(np.float64)
    else:
        numbers = (values.astype(np.int32) << 16).view(np.float32).astype(np.float64)
    scaled = numbers * copies.to_host(into.row_scales)[:, None].astype(np.float64)
    wanted = quantise_op.reference_rounded(x, dtype)
    np.testing.assert_array_equal(scaled[:NUM_LIVE, :width], wanted[:NUM_LIVE])
    assert (numbers[:NUM_LIVE, width : -(-width // 64) * 64] == 0).all()


def test_scales_have_four_bits() -> None:
    scales = quantise_op.reference(_numbers(130))[1]
    assert (bits(scales[np.isfinite(scales)]) & 0xFFFFF == 0).all()
