"""What GPU products read of x: rounded numbers, in the order of columns and in that of lanes."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import (
    bits,
    counts,
    launch,
    random_rows,
    rows_tensor,
    tensor,
    weight_tensor,
)

from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices
from hypocenter.kernels.linear import quantise as quantise_op
from hypocenter.kernels.linear.linear import linear, linear_several
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.linear.quantise import prepare_operands, quantise
from hypocenter.kernels.weights.block_types import dequantise

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


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.Q4_0])
@pytest.mark.parametrize("width", [1, 20, 130])
@pytest.mark.tier("sim", fast=lambda case: case.width > 1)
def test_rounded_numbers_are_the_nearest_ones(dtype: DType, width: int) -> None:
    x = np.nan_to_num(_numbers(width), nan=0, posinf=0)
    into = Operands.allocate([dtype], NUM_ROWS, width, device="sim:mi300x").first(NUM_ROWS)
    # Its bytes are not looked at.
    weight = weight_tensor(DType.F32, random_rows(DType.F32, 1, width), width)
    weight = dataclasses.replace(weight, dtype=dtype)
    given = rows_tensor("x", x, np.nan)
    launch(lambda p: prepare_operands(p, given, [weight], into, counts(NUM_LIVE)), NUM_ROWS)
    made = into.rounded_for(dtype)
    assert made is not None
    assert into.row_scales is not None
    values = copies.to_host(made)
    if dtype is not DType.BF16:
        numbers = values.view(np.float16).astype(np.float64)
    else:
        numbers = (values.astype(np.int32) << 16).view(np.float32).astype(np.float64)
    scaled = numbers * copies.to_host(into.row_scales)[:, None].astype(np.float64)
    wanted = quantise_op.reference_rounded(x, DType.F16 if dtype.is_quantised else dtype)
    np.testing.assert_array_equal(scaled[:NUM_LIVE, :width], wanted[:NUM_LIVE])
    assert (numbers[:NUM_LIVE, width : -(-width // 128) * 128] == 0).all()


def _with_fragments(into: Operands) -> Operands:
    """As on NVIDIA's GPUs."""
    assert into.halves is not None
    fragments = tensor("fragments", np.full(into.halves.shape, 0x7E00, np.uint16))
    return dataclasses.replace(into, fragments=fragments)


@pytest.mark.parametrize("width", [1, 20, 130, 256])
@pytest.mark.tier("sim", fast=lambda case: case.width > 1)
def test_fragments_are_the_halves_in_the_order_of_lanes(width: int) -> None:
    x = np.nan_to_num(_numbers(width), nan=0, posinf=0)[:16]
    into = _with_fragments(Operands.allocate([DType.Q4_0], 16, width, device="sim:mi300x"))
    given = rows_tensor("x", x, np.nan)
    launch(lambda p: quantise(p, given, width, into, counts(13)), 16)
    assert into.halves is not None
    assert into.fragments is not None
    halves, fragments = (copies.to_host(one)[:13] for one in (into.halves, into.fragments))
    stop = -(-width // 128) * 128
    assert (halves[:, width:stop] == 0).all()
    for column in range(stop):
        # PTX ISA, "mma.m16n8k16": lane t holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16.
        chunk, at = divmod(column % 32, 16)
        lane = at % 8 // 2
        place = column - column % 32 + 8 * lane + 4 * chunk + 2 * (at // 8) + at % 2
        np.testing.assert_array_equal(fragments[:, place], halves[:, column])


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.Q4_K, DType.Q2_K, DType.Q8_0, DType.Q6_K])
@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.tier("sim", fast=lambda case: case.dtype in (DType.Q2_K, DType.Q8_0))
def test_products_with_fragments_have_the_bits_of_those_with_halves(
    dtype: DType, num_rows: int
) -> None:
    num_columns = 256 if dtype.block_elements == 256 else 320
    weight = weight_tensor(dtype, random_rows(dtype, 70, num_columns), num_columns)
    x = rows_tensor("x", np.random.default_rng(5).standard_normal((num_rows, num_columns)))
    found = []
    for adapt in (lambda into: into, _with_fragments):
        into = adapt(Operands.allocate([dtype], num_rows, num_columns, device="sim:mi300x"))
        out = rows_tensor("out", np.full((num_rows, 70), np.nan, np.float32))
        build = partial(
            linear_several,
            x=x,
            products=[Product(weight, out)],
            counts=counts(num_rows),
            operands=into,
        )
        launch(build, num_rows)
        found.append(copies.to_host(out)[:, :70])
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("num_rows", [1, 20])
def test_weights_beyond_f16_are_brought_into_it(num_rows: int) -> None:
    """A code times a scale near the end of f16 is four times as large as that."""
    raw = random_rows(DType.Q4_0, 70, 320)
    blocks = raw.reshape(70, 10, -1)
    blocks[:, ::3, :2] = np.array([30000], np.float16).view(np.uint8)
    x = np.random.default_rng(6).standard_normal((num_rows, 320)).astype(np.float32)
    weight, out = weight_tensor(DType.Q4_0, raw, 320), rows_tensor("out", np.zeros((num_rows, 70)))
    launch(
        lambda p: linear(p, rows_tensor("x", x), weight, out, counts(num_rows)),
        num_rows,
    )
    weights = dequantise(raw, DType.Q4_0, 320).astype(np.float64)
    assert np.abs(weights).max() > 2 * 65504
    error = np.abs(copies.to_host(out)[:, :70] - x @ weights.T)
    assert (error <= 2.01 * 2.0**-11 * (np.abs(x) @ np.abs(weights).T)).all()
