"""The vector words against numpy: conversions exhaustively, functions within their stated error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.kernel_launch import for_python

from hypocenter.base.tensor import DType
from hypocenter.device.cpu import cache_lines, vector_rows
from hypocenter.device.cpu.cache_lines import fetch, fetch_ahead, prefetch
from hypocenter.device.cpu.packed_codes import fetch_early
from hypocenter.device.cpu.packed_floats import load_column
from hypocenter.device.cpu.vector import (
    exp,
    exp2,
    keep,
    load,
    load_first,
    max_lanes,
    sigmoid,
    store,
    store_first,
    sum_lanes,
    tanh,
)
from hypocenter.device.cpu.vector_rows import fma_outer, splat_each, store_outer
from hypocenter.kernels.weights.cpu_layout import RECORDS


@for_python
def _copy(source: Any, out: Any) -> None:
    for at in range(0, source.shape[0], 16):
        store(out, at, load(source, at))


@for_python
def _apply(kind: int, source: Any, out: Any) -> None:
    for at in range(0, source.shape[0], 16):
        x = load(source, at)
        if kind == 0:
            store(out, at, exp(x))
        elif kind == 1:
            store(out, at, sigmoid(x))
        elif kind == 3:
            store(out, at, exp2(x))
        else:
            store(out, at, tanh(x))


@for_python
def _copy_first(source: Any, out: Any, num_lanes: int) -> None:
    store_first(out, 0, load_first(source, 0, num_lanes), num_lanes)


@for_python
def _fold(source: Any, low: int, high: int) -> Any:
    x = load(source, 0)
    return sum_lanes(x), max_lanes(x), sum_lanes(keep(x, low, high, np.float32(0)))


def test_every_f16_becomes_its_f32() -> None:
    half = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    _copy(half, out)
    np.testing.assert_array_equal(out, half.view(np.float16).astype(np.float32))


@for_python
def _copy_columns(pairs: Any, column: int, out: Any) -> None:
    for at in range(0, pairs.shape[0], 16):
        store(out, at, load_column(pairs, at, column))


def test_every_bf16_becomes_its_f32() -> None:
    """As the even column of a word and as the odd one, whichever that is."""
    brain = np.arange(65536, dtype=np.uint16)
    other = brain[::-1].copy()
    pairs = np.stack([brain, other], axis=1).view(np.int32).reshape(-1)
    for column, bits in ((0, brain), (1, other), (6, brain), (7, other)):
        out = np.empty(65536, np.float32)
        _copy_columns(pairs, column, out)
        expected = (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(out, expected, err_msg=str(column))


def test_f32_rounds_to_the_nearest_even_f16() -> None:
    """All f16 values, all midpoints between neighbours, the neighbours of those, random bits."""
    exact = np.arange(31744, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (exact[:-1] + exact[1:]) / 2
    around = np.concatenate([np.nextafter(middle, np.float32(x)) for x in (-1e9, 1e9)])
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18).astype(np.uint32)
    limits = np.array([65519.996, 65520, 65536, 1e30, np.inf, np.nan], np.float32)
    values = np.concatenate([exact, middle, around, random.view(np.float32), limits])
    values = np.concatenate([values, -values])
    values = np.resize(values, len(values) // 16 * 16)
    out = np.empty(len(values), np.uint16)
    _copy(values, out)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out.view(np.float16), values.astype(np.float16))


@pytest.mark.parametrize(
    ("kind", "exact", "low", "high"), [(0, np.exp, -87, 88), (3, np.exp2, -126, 126)]
)
def test_powers_are_within_two_ulp(kind: int, exact: Any, low: float, high: float) -> None:
    x = np.linspace(low, high, 1 << 18).astype(np.float32)
    out = np.empty_like(x)
    _apply(kind, x, out)
    right = exact(x.astype(np.float64))
    assert np.max(np.abs(out - right) / right) <= 2 * 2.0**-24


@pytest.mark.parametrize("kind", [0, 3])
def test_powers_at_their_edges(kind: int) -> None:
    x = np.array([0.0, -np.inf, -1e30, np.nan] * 4, np.float32)
    out = np.empty_like(x)
    _apply(kind, x, out)
    assert out[0] == 1
    assert 0 < out[1] < 2e-38
    assert 0 < out[2] < 2e-38
    assert np.isnan(out[3])


def test_sigmoid_and_tanh() -> None:
    x = np.concatenate([np.linspace(-30, 30, 1 << 16), np.linspace(-1e-3, 1e-3, 1 << 10)])
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    out = np.empty_like(x)
    _apply(1, x, out)
    exact = 1 / (1 + np.exp(-wide))
    assert np.max(np.abs(out - exact) / exact) < 4 * 2.0**-24
    _apply(2, x, out)
    assert np.max(np.abs(out - np.tanh(wide))) < 2e-7


def test_partial_vectors_touch_only_their_lanes() -> None:
    source = np.arange(1, 17, dtype=np.float32)
    for num_lanes in range(17):
        out = np.full(16, -1, np.float32)
        _copy_first(source, out, num_lanes)
        np.testing.assert_array_equal(out[:num_lanes], source[:num_lanes])
        assert (out[num_lanes:] == -1).all()


def test_lanes_fold() -> None:
    x = np.random.default_rng(1).integers(-50, 50, 16).astype(np.float32)
    total, largest, part = _fold(x, 3, 9)
    assert (total, largest, part) == (x.sum(), x.max(), x[3:9].sum())


@pytest.mark.parametrize(
    ("processor", "asks", "of_bytes"),
    [
        ("cascadelake", True, True),
        ("emeraldrapids", True, True),
        ("znver5", True, False),
        ("znver4", False, False),
    ],
)
def test_memory_is_asked_for_what_comes_where_that_pays(
    processor: str, asks: bool, of_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Zen 4 reads F16 15 % faster without, Q4_0 24 % and Q4_K 12 %; a Zen 5 loses by it, and an
    Emerald Rapids a quarter or more, of whole bytes too; a Cascade Lake reads F16 10 % faster with
    it, Q4_0 20 %."""
    monkeypatch.setattr(cache_lines, "cpu_name", lambda: processor)
    floats = np.zeros((2, 4, 64), np.float32)

    def read_floats(weights: Any) -> None:
        fetch_ahead(weights, 0, 64)

    def read_codes(records: Any) -> None:
        fetch_early(records, 0, 1)

    for read, weights, always in (
        (read_floats, floats, asks),
        (read_codes, np.zeros((1, 2), RECORDS[DType.Q4_0].record), asks),
        (read_codes, np.zeros((1, 2), RECORDS[DType.Q8_0].record), of_bytes),
    ):
        compiled: Any = for_python(read)
        compiled(weights)
        (code,) = compiled.inspect_llvm().values()
        assert ("@llvm.prefetch" in code) == always, read.__name__


@pytest.mark.parametrize(("processor", "by_fma"), [("znver4", True), ("znver5", False)])
def test_a_zen_4_spreads_numbers_by_multiply_adds(
    processor: str, by_fma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are the same: attention of a long context takes 0.9 of the time by it."""
    monkeypatch.setattr(vector_rows, "cpu_name", lambda: processor)

    def add(values: Any, starts: Any, numbers: Any, out: Any) -> None:
        sums = splat_each(np.float32(1), 8)
        vectors = load(values, starts[0]), load(values, starts[1])
        sums = fma_outer(vectors, numbers, 1, 3, sums)
        store_outer(out, 0, 32, sums, 2)

    rng = np.random.default_rng(3)
    values, numbers = rng.integers(-9, 9, (2, 64)).astype(np.float32)
    starts, out = np.array([5, 24]), np.empty(128, np.float32)
    compiled: Any = for_python(add)
    compiled(values, starts, numbers, out)
    factors = np.stack([values[at : at + 16] for at in starts])
    expected = 1 + numbers[1 : 1 + 4 * 3 : 3, None, None] * factors
    np.testing.assert_array_equal(out, expected.ravel())
    (code,) = compiled.inspect_llvm().values()
    assert ('asm ""' in code) == by_fma


def test_what_comes_is_asked_for_by_whole_lines_of_the_second_cache() -> None:
    def ask(values: Any) -> None:
        prefetch(values, 3, 32)

    for dtype, num_lines in ((np.uint16, 1), (np.float32, 2)):
        compiled: Any = for_python(ask)
        compiled(np.zeros(64, dtype))
        code = compiled.inspect_llvm(compiled.signatures[0])
        asked = [line for line in code.splitlines() if "call void @llvm.prefetch" in line]
        assert len(asked) == num_lines
        assert all(line.rstrip().endswith("i32 0, i32 2, i32 1)") for line in asked)


def test_what_is_fetched_is_loaded_by_whole_lines() -> None:
    """Nobody looks at what is loaded, so the compiler might leave it out."""

    def some(values: Any) -> None:
        fetch(values, 3, 16)

    def more(values: Any) -> None:
        fetch(values, 3, 32)

    for load_them, dtype, num_lines in ((some, np.uint16, 1), (more, np.uint16, 1),
                                        (some, np.float32, 1), (more, np.float32, 2)):  # fmt: skip
        compiled: Any = for_python(load_them)
        compiled(np.zeros(64, dtype))
        code = compiled.inspect_llvm(compiled.signatures[0])
        loads = [line for line in code.splitlines() if "load atomic" in line]
        assert len({line.split(", ptr")[1] for line in loads}) == num_lines
