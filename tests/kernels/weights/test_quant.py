"""Block types are read as the gguf package reads them, and packing loses nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.kernel_launch import BLOCK_TYPES, bits, random_rows
from repository import DEMO

from hypocenter.base.tensor import WEIGHT_TYPES, DType
from hypocenter.device.cpu.code_fields import MINIS_FIELD, POWERS_FIELD
from hypocenter.device.cpu.threads import max_num_threads
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.weights import block_types, gpu_layout, grid_types, packing, row_groups
from hypocenter.kernels.weights.cpu_layout import RecordLayout, layout_of
from hypocenter.kernels.weights.row_groups import SLAB_ROWS
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig


def _oracle(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """As the `gguf` package dequantises rows; what it cannot read as the format says, in a loop."""
    bits_of_code = {DType.Q1_0: 1, DType.Q2_0: 2}.get(dtype)
    if bits_of_code is None:
        found = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(dtype.ggml_id))
        return np.asarray(found, np.float32)
    blocks = raw.reshape(-1, dtype.block_bytes)
    values = np.empty((len(blocks), dtype.block_elements), np.float32)
    for own, row in zip(blocks, values, strict=True):
        scale, number = own[:2].view(np.float16)[0], int.from_bytes(own[2:].tobytes(), "little")
        for column in range(len(row)):
            code = number >> (bits_of_code * column) & (2**bits_of_code - 1)
            row[column] = np.float32(scale) * np.float32(
                2 * code - 1 if dtype is DType.Q1_0 else code - 1
            )
    return values.reshape(len(raw), -1)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_dequantisation_is_bit_equal_to_the_gguf_package(dtype: DType) -> None:
    raw = random_rows(dtype, 300, 512)
    assert (bits(block_types.dequantise(raw, dtype, 512)) == bits(_oracle(raw, dtype))).all()


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("iq1", "IQ1_S"), ("iq2_xxs", "IQ2_XXS"), ("iq2_xs", "IQ2_XS"), ("iq2_s", "IQ2_S"),
        ("iq3_xxs", "IQ3_XXS"), ("iq3_s", "IQ3_S"),
    ],
)  # fmt: skip
def test_grids_are_those_of_the_gguf_package(name: str, package: str) -> None:
    """But for a factor, by which a scale is smaller."""
    kind = getattr(gguf.quants, package)
    kind.init_grid()
    factor = {"iq1": 8, "iq3_xxs": 0.5}.get(name, 1)
    np.testing.assert_array_equal(grid_types.grid(name), kind.grid[0, 0] * factor)


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_bytes_dequantise_as_the_gguf_package_does(dtype: DType, data: st.DataObject) -> None:
    """Arbitrary scales too: infinities and NaN come out where the oracle has them."""
    raw = np.frombuffer(
        data.draw(st.binary(min_size=dtype.block_bytes, max_size=dtype.block_bytes)), np.uint8
    )
    with np.errstate(all="ignore"):
        if block_types.find_reserved(raw[None], dtype):
            return
        oracle = _oracle(raw[None], dtype)
        ours = block_types.dequantise(raw[None], dtype, dtype.block_elements)
    np.testing.assert_array_equal(ours, oracle)


def test_ids_and_sizes_are_those_of_the_format() -> None:
    assert (DType.Q2_0.ggml_id, DType.Q2_0.block_elements, DType.Q2_0.block_bytes) == (42, 64, 18)
    for dtype in set(WEIGHT_TYPES) - {DType.Q2_0}:  # which the package does not know
        kind = gguf.GGMLQuantizationType[dtype.name]
        assert dtype.ggml_id == kind.value
        assert (dtype.block_elements, dtype.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
@pytest.mark.parametrize("num_rows", [1, 15, 64, 1025])
@pytest.mark.tier("sim", fast=lambda case: case.num_rows == 15)
def test_a_packed_weight_holds_every_value_once(dtype: DType, num_rows: int) -> None:
    for num_columns in (512, 3 * dtype.block_elements) if dtype.block_elements < 256 else (512,):
        raw = random_rows(dtype, num_rows, num_columns)
        packed = packing.pack(raw, dtype, num_columns)
        assert packed.num_rows == num_rows
        assert packed.num_bytes == sum(part.nbytes for part in packed.parts)
        exact = block_types.dequantise(raw, dtype, num_columns)
        assert (bits(_unpacked(packed)) == bits(exact)).all()


def _unpacked(packed: packing.Packed) -> np.ndarray:
    """The packed layout read back by its description in `cpu_layout.py`, in plain numpy."""
    if not packed.dtype.is_quantised:
        (weights,) = packed.parts
        if packed.dtype is DType.BF16:  # words of two columns
            halves = weights.view(np.uint16).reshape(*weights.shape, 2)
            weights = halves.transpose(0, 1, 3, 2).reshape(len(weights), -1, weights.shape[2])
        rows = weights.transpose(0, 2, 1).reshape(-1, packed.num_columns)[: packed.num_rows]
        rows = np.ascontiguousarray(rows)
        if packed.dtype is DType.F32:
            return rows
        if packed.dtype is DType.F16:
            return rows.view(np.float16).astype(np.float32)
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    (items,) = packed.parts
    records = items.transpose(0, 2, 1).reshape(-1, items.shape[1])
    layout = layout_of(packed.dtype, packed.num_columns)
    columns, meanings = [], layout.meanings.astype(np.float32)
    for k in range(packed.num_columns):
        record, within = records[:, k // layout.num_columns], k % layout.num_columns
        bits = _code(record, layout, within)
        code = meanings[bits] if layout.sizes else bits.astype(np.float32) - layout.zero
        value = code * _number(record, layout.scale, within // layout.group)
        if layout.has_minima:
            value += _number(record, "minimum", within // layout.group)
        columns.append(value)
    return np.stack(columns, -1).reshape(-1, packed.num_columns)[: packed.num_rows]


def _code(record: np.ndarray, layout: RecordLayout, column: int) -> np.ndarray:
    """Column `column` of each row, [groups, 16]: byte b of word j has column 4 j + b."""
    word, byte = column // 4, column % 4
    step, word = record[layout.codes][:, word // 8], word % 8
    if layout.planes == (8,):
        return np.asarray((step[:, word] << (24 - 8 * byte)) >> 24)
    step = step.view(np.uint32).astype(np.int64) >> 8 * byte
    if layout.planes == (6,):
        first = word // 4 * 3
        if word % 4 < 3:
            return np.asarray(step[:, first + word % 4] & 63)
        parts = [((step[:, first + i] >> 6) & 3) << 2 * i for i in range(3)]
        return np.asarray(np.bitwise_or.reduce(parts))
    code, low = np.zeros(record[layout.scale][:, 0].shape, np.int64), 0
    for width in layout.planes:
        vector, shift = step[:, low + word // (8 // width)], width * (word % (8 // width))
        code += ((vector >> shift) & ((1 << width) - 1)) << low
        low += width
    return code


def _number(record: np.ndarray, whole: str, index: int) -> np.ndarray:
    names, small = record.dtype.names or (), None
    if whole == POWERS_FIELD:
        return (record[whole][:, index].astype(np.uint32) << 16).view(np.float32)
    if whole == MINIS_FIELD:
        mini = (record[whole][:, index].astype(np.uint16) << 7).view(np.float16)
        return np.asarray(mini.astype(np.float32) * record["scale"][:, 0])
    shift = 4 if whole == "minimum" else 0
    if "pairs" in names:
        small = (record["pairs"][:, index] >> shift) & 15
    elif "scales" in names:
        small = record["scales"][:, index]
    if "tops" in names and small is not None:
        small += ((record["tops"][:, index % 4] >> (4 * (index // 4) + shift // 2)) & 3) << 4
    own = record[whole][:, index if small is None else 0]
    value = own if own.dtype == np.float32 else own.view(np.float16).astype(np.float32)
    return value if small is None else value * small.astype(np.float32)


def test_every_power_of_two_of_mxfp4_is_packed() -> None:
    """Those of which half is a subnormal number, too; f16 holds but a few of them.

    Of the largest f32 does not hold what codes stand for.
    """
    blocks = np.random.default_rng(3).integers(0, 256, (252, 2, 17), np.uint8)
    blocks[..., 0] = np.arange(252)[:, None]
    raw = blocks.reshape(252, -1)
    found = _unpacked(packing.pack(raw, DType.MXFP4, 64))
    assert (bits(found) == bits(block_types.dequantise(raw, DType.MXFP4, 64))).all()


#: A type that is packed in each way.
OF_SLABS = (DType.F32, DType.BF16, DType.Q4_K, DType.Q6_K, DType.NVFP4, DType.IQ2_XS, DType.TQ1_0)
FACTORS = np.array([0.37, 3, 1e-5], np.float32)


def test_factors_of_nvfp4_are_those_of_their_matrices() -> None:
    """A factor for each expert, one for a whole weight, and one for each of two by turns."""
    raw, num_rows = random_rows(DType.NVFP4, 3 * 128, 320), 128
    exact = block_types.dequantise(raw, DType.NVFP4, 320)
    whole = exact * np.repeat(FACTORS, num_rows)[:, None]
    found = _unpacked(packing.pack(raw, DType.NVFP4, 320, factors=FACTORS))
    np.testing.assert_allclose(found, whole, rtol=2.0**-22)
    raws, factors = np.split(raw, 3), [FACTORS[:1], None, FACTORS[2:]]
    by_turns = _unpacked(packing.pack_by_turns(raws, DType.NVFP4, 320, factors=factors))
    by_turns = by_turns.reshape(2, 3, 64, 320).transpose(1, 0, 2, 3).reshape(whole.shape)
    whole[num_rows : 2 * num_rows] = exact[num_rows : 2 * num_rows]
    np.testing.assert_allclose(by_turns, whole, rtol=2.0**-22)


def test_factors_of_nvfp4_on_a_gpu() -> None:
    raw = random_rows(DType.NVFP4, 3 * 64, 256)
    plain = _unscaled(gpu_layout.pack_units(raw, DType.NVFP4, 256))[1]
    one = _unscaled(gpu_layout.pack_units(raw, DType.NVFP4, 256, factors=FACTORS[:1]))[1]
    np.testing.assert_allclose(one, plain * FACTORS[0], rtol=2.0**-22)
    each = _unscaled(gpu_layout.pack_units(raw, DType.NVFP4, 256, factors=FACTORS))[1]
    own = np.repeat(FACTORS, 8)[:, None, None, None]
    np.testing.assert_allclose(each, plain * own, rtol=2.0**-11, atol=2.0**-24)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
@pytest.mark.parametrize("device", ["cpu", "sim:mi300x"])
@pytest.mark.tier("sim", fast=lambda case: case.dtype in OF_SLABS)
def test_slabs_of_rows_are_packed_where_they_belong(dtype: DType, device: str) -> None:
    """Several threads pack one weight, each some rows of it at a time."""
    raw = random_rows(dtype, 2 * SLAB_ROWS + 70, 256)
    whole = packing.pack(raw, dtype, 256, device=device, on_host=True)
    parts = [
        packing.pack(raw[start : start + SLAB_ROWS], dtype, 256, device=device, on_host=True).parts
        for start in range(0, len(raw), SLAB_ROWS)
    ]
    if device != "cpu" and dtype.is_quantised:  # scales and minima are over a factor of their own
        whole_parts, parts = _unscaled(whole.parts), [_unscaled(slab) for slab in parts]
    else:
        whole_parts = whole.parts
    for found, *slabs in zip(whole_parts, *parts, strict=True):
        if isinstance(found, np.ndarray):
            assert found.tobytes() == b"".join(slab.tobytes() for slab in slabs)


def _unscaled(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    words, scales, minima, _, factor = parts
    return words, *(one.view(np.float16).astype(np.float64) * factor for one in (scales, minima))


def test_as_many_threads_pack_as_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _asked_of_pools(monkeypatch)
    with open_gguf(DEMO) as file:
        for num_threads in (1, 2):
            load_runner(file, EngineConfig(num_threads=num_threads, context_length=64))
            assert set(asked) == {min(num_threads, max_num_threads())}
            asked.clear()


def test_no_more_than_eight_threads_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory for the rows that it packs."""
    asked = _asked_of_pools(monkeypatch)
    monkeypatch.setattr(row_groups, "num_threads", lambda: 64)
    packing.pack(random_rows(DType.Q4_0, 64, 64), DType.Q4_0, 64)
    assert asked == [8]


def _asked_of_pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of threads of each pool that packs from now on."""
    asked = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, max_workers: int) -> None:
            asked.append(max_workers)
            super().__init__(max_workers)

    monkeypatch.setattr(row_groups, "ThreadPoolExecutor", Pool)
    return asked


def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        row_groups.side_by_side(lambda part: 1 // part, [1, 0, 1])


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_a_packed_weight_is_about_as_large_as_in_the_file(dtype: DType) -> None:
    """Q3_K keeps scales of 6 bits in bytes, MXFP4 those of 8 in two, IQ4 types what codes mean.

    Entries of grids become codes of four bits, of three where they are of six numbers; those of
    three numbers, or of two, become codes of two bits.
    """
    allowed = {
        DType.Q3_K: 1.06, DType.MXFP4: 1.06, DType.NVFP4: 1.12, DType.IQ4_NL: 1.9,
        DType.IQ4_XS: 2.0, DType.IQ3_S: 1.28, DType.IQ3_XXS: 1.43, DType.IQ2_S: 1.42,
        DType.IQ2_XS: 1.57, DType.IQ2_XXS: 1.64, DType.IQ1_M: 2.08, DType.IQ1_S: 2.16,
        DType.TQ2_0: 1.04, DType.TQ1_0: 1.26, DType.Q2_0: 1.12, DType.Q1_0: 2.23,
    }  # fmt: skip
    for num_columns in (2048, 896) if dtype.block_elements < 256 else (2048,):
        raw = random_rows(dtype, 64, num_columns)
        packed = packing.pack(raw, dtype, num_columns)
        assert packed.num_bytes <= allowed.get(dtype, 1.01) * raw.nbytes


@pytest.mark.parametrize(
    ("dtype", "num_columns", "of_a_record"),
    [
        (DType.Q8_0, 512, 256), (DType.Q8_0, 320, 64), (DType.Q4_0, 512, 64),
        (DType.Q4_K, 512, 256), (DType.IQ4_XS, 256, 256), (DType.Q5_1, 768, 256),
    ],
)  # fmt: skip
def test_records_are_wide_where_that_is_faster_and_fits(
    dtype: DType, num_columns: int, of_a_record: int
) -> None:
    raw = random_rows(dtype, 64, num_columns)
    (records,) = packing.pack(raw, dtype, num_columns).parts
    assert records.shape == (1, num_columns // of_a_record, 4)


def test_the_scale_of_nvfp4_that_is_no_number_is_read_as_ggml_does() -> None:
    """As 0; the same bits with a sign are refused (`ggml_ue4m3_to_fp32` reads a number)."""
    raw = random_rows(DType.NVFP4, 3, 128)
    assert block_types.as_ggml_reads(raw) is raw
    changed = raw.copy()
    changed[1, 2] = 0x7F  # of the third group of 16 of its first block
    read = block_types.as_ggml_reads(changed)
    assert block_types.find_reserved(read, DType.NVFP4) is None
    values = block_types.dequantise(read, DType.NVFP4, 128)
    sound = block_types.dequantise(raw, DType.NVFP4, 128)
    assert not values[1, 32:48].any()
    assert sound[1, 32:48].any()
    sound[1, 32:48] = 0
    assert np.array_equal(values, sound)
    changed[1, 2] = 0xFF
    assert block_types.find_reserved(block_types.as_ggml_reads(changed), DType.NVFP4) == (1, 0, 255)
