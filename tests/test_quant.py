"""Block types are read as the gguf package reads them, and packing loses nothing."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launch import BLOCK_TYPES, bits, random_rows

from hypocenter.kernels import block_types, quant
from hypocenter.tensor import WEIGHT_TYPES, DType


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_dequantisation_is_bit_equal_to_the_gguf_package(dtype: DType) -> None:
    raw = random_rows(dtype, 300, 512)
    oracle = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype.name])
    assert (bits(block_types.dequantise(raw, dtype, 512)) == bits(oracle.astype(np.float32))).all()


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_bytes_dequantise_as_the_gguf_package_does(dtype: DType, data: st.DataObject) -> None:
    """Arbitrary scales too: infinities and NaN come out where the oracle has them."""
    raw = np.frombuffer(
        data.draw(st.binary(min_size=dtype.block_bytes, max_size=dtype.block_bytes)), np.uint8
    )
    with np.errstate(all="ignore"):
        oracle = gguf.quants.dequantize(raw[None], gguf.GGMLQuantizationType[dtype.name])
        ours = block_types.dequantise(raw[None], dtype, dtype.block_elements)
    np.testing.assert_array_equal(ours, oracle)


def test_ids_and_sizes_are_those_of_the_format() -> None:
    for dtype in WEIGHT_TYPES:
        kind = gguf.GGMLQuantizationType[dtype.name]
        assert dtype.ggml_id == kind.value
        assert (dtype.block_elements, dtype.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
@pytest.mark.parametrize("num_rows", [1, 15, 64, 1025])
def test_a_packed_weight_holds_every_value_once(dtype: DType, num_rows: int) -> None:
    raw = random_rows(dtype, num_rows, 256)
    packed = quant.pack(raw, dtype, 256)
    assert packed.num_rows == num_rows
    assert packed.num_bytes == sum(p.nbytes for p in packed.parts if isinstance(p, np.ndarray))
    assert (bits(_unpacked(packed)) == bits(block_types.dequantise(raw, dtype, 256))).all()


def _unpacked(packed: quant.Packed) -> np.ndarray:
    """The packed layout read back by its description in `Packed`, in plain numpy."""
    if packed.layout.is_float:
        (weights,) = packed.parts
        rows = weights.transpose(0, 2, 1).reshape(-1, packed.num_columns)[: packed.num_rows]
        rows = np.ascontiguousarray(rows)
        if weights.dtype == np.float32:
            return rows
        if weights.dtype == np.uint16:
            return rows.view(np.float16).astype(np.float32)
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    words, scales, minima, zero = packed.parts
    columns = []
    for k in range(packed.num_columns):
        if words.dtype == np.int32:
            code = (words[:, k // 4] << (24 - 8 * (k % 4))) >> 24
        else:
            j = k % 8
            code = (words[:, k // 8] >> (8 * (j % 4) + 4 * (j // 4))) & 15
        s = k * scales.shape[1] // packed.num_columns
        value = (code.astype(np.float32) - zero) * _wide(scales[:, s])
        columns.append(value + _wide(minima[:, s]) if minima.size else value)
    return np.stack(columns, -1).reshape(-1, packed.num_columns)[: packed.num_rows]


def _wide(values: np.ndarray) -> np.ndarray:
    return values.view(np.float16).astype(np.float32) if values.dtype == np.uint16 else values
