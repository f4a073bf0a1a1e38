"""Each op against its plain reference in float64, on odd shapes, with bounds that a bug exceeds."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_forms import FORMS, use_form
from ops.kernel_launch import (
    bits,
    counts,
    launch,
    random_rows,
    rows_tensor,
    tensor,
    vector_tensor,
    weight_tensor,
)

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import WEIGHT_TYPES, DType
from hypocenter.device.copies import to_host
from hypocenter.kernels.attention import attention, kv_write, rope
from hypocenter.kernels.linear import linear, operands, quantise
from hypocenter.kernels.rowwise import activation, embedding, layer_norm, norm
from hypocenter.kernels.weights import block_types, gpu_layout
from hypocenter.verify import bounds

EPS = 2.0**-24


@pytest.fixture(params=FORMS, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def as_multiplied(x: np.ndarray, dtype: DType) -> np.ndarray:
    """x as a product with such weights takes it: as codes or rounded, in float64, or as it is."""
    if dtype is DType.F32 or (not dtype.is_quantised and kernel_launch.device == "cpu"):
        return x
    if kernel_launch.device != "cpu":
        return quantise.reference_rounded(x, DType.F16 if dtype.is_quantised else dtype)
    codes, scales, _ = quantise.reference(x)
    values: np.ndarray = codes.reshape(len(x), -1, 32).astype(np.float64) * scales[..., None]
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def group_steps(x: np.ndarray) -> np.ndarray:
    """The step between codes of each group of 32 columns."""
    return np.asarray(np.abs(x).reshape(len(x), -1, 32).max(axis=-1) / 127)


#: Columns that make wide records, those that make narrow ones, and for floats an odd number, beside
#: which bf16 lies in pairs elsewhere.
COLUMNS = [(dtype, 512 if dtype.is_quantised else 131) for dtype in WEIGHT_TYPES]
COLUMNS += [(DType.BF16, 130)]
COLUMNS += [(dtype, 416) for dtype in WEIGHT_TYPES if dtype.block_elements == 32]
#: A type of each layout of records: bytes, nibbles, nibbles and bits, crumbs, those and bits, six
#: bits, floats of four bits, those with small floats for scales, sizes with signs, a scale for all
#: columns of a record; and the floats.
OF_EACH_LAYOUT = (
    DType.Q8_0, DType.Q4_K, DType.Q5_0, DType.Q2_K, DType.Q3_K, DType.Q6_K, DType.MXFP4,
    DType.NVFP4, DType.IQ2_XS, DType.TQ2_0, DType.F32, DType.F16, DType.BF16,
)  # fmt: skip
#: Of those the ones that only a CPU holds in a way of their own.
OF_CPU_LAYOUTS = (DType.NVFP4, DType.IQ2_XS, DType.TQ2_0)
#: Of those the ones that a form is compiled for which no model needs.
FEW_TYPES = (DType.Q8_0, DType.Q4_K, DType.F16)


def is_in_short_grid(case: SimpleNamespace) -> bool:
    """One type per layout; all shapes on one thread, few in the other forms, fewer on a GPU."""
    if case.dtype not in OF_EACH_LAYOUT:
        return False
    if case.dtype in OF_CPU_LAYOUTS:  # on a GPU they lie as others do
        return case.device == "one thread" and case.num_rows in (3, 66)
    if case.device == "one thread":
        return bool(case.num_columns != 416)
    if case.device == "many threads":  # which are compiled anew
        return case.num_rows in (3, 66) and case.dtype in FEW_TYPES and case.num_columns != 416
    if case.device == "sim:mi300x":
        is_many = case.dtype in (DType.F16, DType.Q4_K) and case.num_rows == 66
        return case.num_rows == 3 or is_many
    return case.num_rows in (3, 66) and case.num_columns != 416


@pytest.mark.parametrize(("dtype", "num_columns"), COLUMNS)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs"), [(1, 1), (3, 127), (5, 129), (8, 64), (66, 33)]
)
@pytest.mark.tier("sim", fast=is_in_short_grid)
def test_linear(dtype: DType, num_columns: int, num_rows: int, num_outputs: int) -> None:
    raw = random_rows(dtype, num_outputs, num_columns)
    weights = block_types.dequantise(raw, dtype, num_columns).astype(np.float64)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
    last = np.flatnonzero(weights.any(axis=0))[-1]
    x[:, last] = 4  # so that the last column weighs enough to be missed
    bias, before = (rng.standard_normal(n).astype(np.float32) for n in (num_outputs, num_outputs))
    out = rows_tensor("out", np.tile(before, (num_rows, 1)))
    launch(
        lambda p: linear.linear(
            p, rows_tensor("x", x, fill=np.nan), weight_tensor(dtype, raw, num_columns), out,
            counts(num_rows), bias=vector_tensor("bias", bias), accumulate=True,
        ),
        num_rows,
    )  # fmt: skip
    given, float_exact = np.abs(x), linear.reference(x, weights, bias) + before
    x, is_rounded = as_multiplied(x, dtype), dtype.is_quantised and kernel_launch.device != "cpu"
    if is_rounded:
        weights = gpu_layout.reference(raw, dtype, num_columns)
    exact = linear.reference(x, weights, bias) + before
    size = np.abs(x) @ np.abs(weights).T + np.abs(bias) + np.abs(before)
    got = to_host(out)[:, :num_outputs]
    assert np.max(np.abs(got - exact) / size) <= (math.log2(num_columns) + 4) * EPS
    if is_rounded:
        # x, scale, minimum and their sum are each off by 2**-11 at most.
        assert (
            np.abs(got - float_exact)
            <= given @ bounds.of_block_rounding(raw, dtype).T + 1e-5 * size
        ).all()
    elif dtype.is_quantised:
        # Codes are off by half a step at most, a step being 1 / 127 of the largest in its group.
        off = np.repeat(group_steps(x), 32, axis=1) / 2
        assert (np.abs(got - float_exact) <= off @ np.abs(weights).T + 1e-5 * size).all()
    # One column less is far outside the bound.
    short = exact - np.outer(x[:, last], weights[:, last])
    assert np.max(np.abs(short - exact) / size) > 10 * (math.log2(num_columns) + 4) * EPS


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
@pytest.mark.tier(
    "sim",
    fast=lambda case: case.dtype in (OF_EACH_LAYOUT if case.device == "one thread" else FEW_TYPES),
)
def test_a_row_of_linear_does_not_depend_on_its_company(device: str, dtype: DType) -> None:
    """Alone, among few, some and many: on a GPU those are forms of two kernels."""
    is_paired = dtype is DType.BF16 and device == "cpu"
    # On a GPU of 10 or 20 units: the last chain that has any has fewer than the others.
    num_columns = 1280 if dtype.is_quantised else 386 if is_paired else 387
    weight = weight_tensor(dtype, random_rows(dtype, 70, num_columns), num_columns)
    x = np.random.default_rng(2).standard_normal((66, num_columns)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(3).integers(-9, 9, x.shape)).astype(np.float32)

    def product(rows: np.ndarray) -> np.ndarray:
        out = rows_tensor("out", np.zeros((len(rows), 70), np.float32))
        launch(
            lambda p: linear.linear(p, rows_tensor("x", rows), weight, out, counts(len(rows))),
            len(rows),
        )
        return to_host(out)

    together = product(x)
    for start, stop in ((0, 1), (2, 5), (3, 20)):
        assert (bits(product(x[start:stop])) == bits(together[start:stop])).all(), (start, stop)


@pytest.mark.parametrize("device", ["one thread", "guard pages"], indirect=True)
@pytest.mark.parametrize("num_rows", [19, 7])  # more than a tile and less
@pytest.mark.parametrize("width", [1, 64, 130, 1100])
def test_codes_of_activations_are_those_of_the_reference(
    device: str, width: int, num_rows: int
) -> None:
    """Every bit; rows of zeros, of tiny, huge and undefined numbers, and ties among them."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    x[1], x[2], x[3] = 0, x[2] * np.float32(1e-35), x[3] * np.float32(1e30)
    x[4, -1], x[5, 0] = np.nan, np.inf
    x[6] = np.arange(width) % 32 / 2
    x[6, ::32] = 127
    into = operands.Operands.allocate([DType.Q4_0], num_rows, width, device=device)
    weight = weight_tensor(DType.F32, random_rows(DType.F32, 1, width), width)
    weight = dataclasses.replace(weight, dtype=DType.Q4_0)
    given = rows_tensor("x", x, np.nan)
    launch(
        lambda p: quantise.prepare_operands(p, given, [weight], into, counts(num_rows)), num_rows
    )
    codes, scales, sums = quantise.reference(x)
    assert into.codes is not None
    assert into.scales is not None
    assert into.sums is not None
    assert into.weighted is not None
    tiles, weighted = to_host(into.codes), to_host(into.weighted)
    assert_tiles(tiles, to_host(into.scales), to_host(into.sums), weighted, codes, scales, sums)


def assert_tiles(
    tiles: np.ndarray, tile_scales: np.ndarray, tile_sums: np.ndarray, weighted: np.ndarray,
    codes: np.ndarray, scales: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """The operands of CPU kernels are those codes, scales and sums, in tiles of 16 rows."""

    def by_row(tiled: np.ndarray) -> np.ndarray:
        """[tiles, groups, ..., 16] to [rows, groups, ...]."""
        rows = np.moveaxis(tiled, -1, 1)
        return rows.reshape(-1, *rows.shape[2:])[: len(codes)]

    found = tiles.transpose(0, 2, 1, 3).reshape(-1, *tiles.shape[1::2])[: len(codes)]
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.int8).reshape(codes.shape), codes
    )
    np.testing.assert_array_equal(bits(by_row(tile_scales)), bits(scales))
    halves = sums.reshape(len(codes), -1, 2)
    three = np.stack([halves[..., 0], halves[..., 1], halves.sum(axis=-1)], axis=-1)
    np.testing.assert_array_equal(by_row(tile_sums), three)
    expected = three.astype(np.float32) * scales[..., None]
    np.testing.assert_array_equal(bits(by_row(weighted)), bits(expected))


@pytest.mark.parametrize(("dtype", "num_columns"), COLUMNS)
@pytest.mark.tier(
    "sim",
    fast=lambda case: (
        case.dtype in (OF_EACH_LAYOUT if case.device == "one thread" else FEW_TYPES)
        and case.num_columns != 416
    ),
)
def test_lookup_is_exact(dtype: DType, num_columns: int) -> None:
    raw = random_rows(dtype, 130, num_columns)
    ids = np.array([129, 0, 15, 16, 77], np.int32)
    out = rows_tensor("out", np.zeros((5, num_columns), np.float32))
    launch(
        lambda p: embedding.lookup(
            p, tensor("token_ids", ids), weight_tensor(dtype, raw, num_columns), out, counts(5)
        ),
        5,
    )
    exact = block_types.dequantise(raw, dtype, num_columns)[ids].astype(np.float64)
    error = np.abs(to_host(out)[:, :num_columns] - exact)
    if kernel_launch.device != "cpu" and dtype.block_elements == 256:
        # Products of two fields are rounded to f16, the scale and the minimum.
        assert (error <= bounds.of_block_rounding(raw, dtype)[ids] * (2 / 3) + 64 * EPS * 8).all()
        return
    # scale * code + minimum in one rounding here, in two where both are stored.
    assert np.max(error / np.maximum(np.abs(exact), 1e-3)) <= (
        0 if not dtype.is_quantised else 1e-3
    )
    assert np.max(error) <= 64 * EPS * 8


@pytest.mark.parametrize("width", [1, 3, 64, 127, 129])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rms_norm(width: int, num_heads: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, num_heads * width)).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    out = rows_tensor("out", np.ones_like(x))
    launch(
        lambda p: norm.rms_norm(
            p, rows_tensor("x", x, fill=np.nan), vector_tensor("weight", weight), 1e-5, out,
            counts(5), width=width, num_heads=num_heads, accumulate=True,
        ),
        5,
    )  # fmt: skip
    exact = norm.reference(x.reshape(5, num_heads, width), weight, 1e-5).reshape(5, -1)
    got = to_host(out)[:, : num_heads * width]
    assert np.max(np.abs(got - 1 - exact) / (np.abs(exact) + 1)) <= 8 * EPS
    assert (to_host(out)[:, num_heads * width :] == 0).all()


@pytest.mark.parametrize("width", [1, 3, 64, 127, 129])
def test_layer_norm(width: int) -> None:
    rng = np.random.default_rng(3)
    # Far from 0, where a variance that is the difference of two large numbers would be lost.
    x = (rng.standard_normal((5, width)) + 30).astype(np.float32)
    weight, bias = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    out = rows_tensor("out", np.full_like(x, np.nan))
    launch(
        lambda p: layer_norm.layer_norm(
            p, rows_tensor("x", x, fill=np.nan), vector_tensor("weight", weight),
            vector_tensor("bias", bias), 1e-5, out, counts(5), width=width,
        ),
        5,
    )  # fmt: skip
    exact = layer_norm.reference(x, weight, bias, 1e-5)
    # The mean is rounded to the grid of its own size, which is 32 times that of what is left.
    got = to_host(out)[:, :width]
    spread = 1 + np.abs(x).max() / np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + 1e-5)
    assert np.max(np.abs(got - exact) / spread) <= 16 * EPS
    assert (to_host(out)[:, width:] == 0).all()


@pytest.mark.parametrize(("num_heads", "width"), [(3, 20), (2, 64), (5, 1)])
def test_layer_norm_of_each_head(num_heads: int, width: int) -> None:
    """In place, as heads of queries are; each has weights of its own."""
    rng, columns = np.random.default_rng(5), num_heads * width
    x = rng.standard_normal((4, columns)).astype(np.float32)
    weight, bias = (rng.standard_normal(columns).astype(np.float32) for _ in range(2))
    normed = rows_tensor("x", x, fill=7.0)
    launch(
        lambda p: layer_norm.layer_norm(
            p, normed, vector_tensor("weight", weight), vector_tensor("bias", bias), 1e-5, normed,
            counts(3), width=width, num_heads=num_heads,
        ),
        4,
    )  # fmt: skip
    heads = (num_heads, width)
    exact = layer_norm.reference(
        x.reshape(4, *heads), weight.reshape(heads), bias.reshape(heads), 1e-5
    ).reshape(x.shape)
    got = to_host(normed)
    assert np.max(np.abs(got[:3, :columns] - exact[:3])) <= 32 * EPS
    np.testing.assert_array_equal(got[3, :columns], x[3])
    assert (got[:, columns:] == 7).all()


@pytest.mark.parametrize("style", ["normal", "neox"])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(2, 2), (64, 64), (20, 12)])
def test_rope(style: str, head_dim: int, rope_dim: int) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((6, 3, head_dim)).astype(np.float32)
    positions = np.array([0, 1, 2, 511, 3, 100], np.int32)
    cos, sin = rope.tables(512, rope_dim, 10000.0)
    turned = rows_tensor("x", x.reshape(6, -1))
    launch(
        lambda p: rope.rotate(
            p, turned, tensor("positions", positions), (tensor("cos", cos), tensor("sin", sin)),
            counts(6), num_heads=3, head_dim=head_dim, style=style,
        ),
        6,
    )  # fmt: skip
    exact = rope.reference(x, cos[positions], sin[positions], style)
    got = to_host(turned)[:, : 3 * head_dim].reshape(6, 3, head_dim)
    assert np.max(np.abs(got - exact)) <= 8 * EPS * np.abs(x).max()
    np.testing.assert_array_equal(got[..., rope_dim:], x[..., rope_dim:])


def test_rope_tables_follow_their_formulas() -> None:
    cos, _ = rope.tables(8, 4, 100.0)
    np.testing.assert_allclose(cos[3], np.cos([3.0, 0.3]), rtol=1e-6)
    cos, _ = rope.tables(8, 4, 100.0, scaling="linear", factor=2.0)
    np.testing.assert_allclose(cos[6], np.cos([3.0, 0.3]), rtol=1e-6)
    cos, _ = rope.tables(8, 4, 100.0, divisors=np.array([1.0, 3.0]), attn_factor=2.0)
    np.testing.assert_allclose(cos[3], 2 * np.cos([3.0, 0.1]), rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, _ = rope.tables(64, 64, 10000.0)
    yarn, _ = rope.tables(64, 64, 10000.0, scaling="yarn", factor=4.0, original_context=2048)
    slow, _ = rope.tables(64, 64, 10000.0, scaling="linear", factor=4.0)
    temper = 1 + 0.1 * math.log(4.0)
    np.testing.assert_allclose(yarn[:, 0], temper * plain[:, 0], atol=1e-6)
    np.testing.assert_allclose(yarn[:, -1], temper * slow[:, -1], atol=1e-6)


class _Cache:
    """Pages with their blocks in a shuffled order, written through the op itself."""

    def __init__(self, k: np.ndarray, v: np.ndarray, block_size: int, dtype: str) -> None:
        num_keys, num_heads, head_dim = k.shape
        num_blocks = -(-num_keys // block_size)
        kind = np.uint16 if dtype == "f16" else np.float32
        pitch = -(-head_dim // 16) * 16
        rng = np.random.default_rng(5)
        self.table = rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32)
        nan = np.float16(np.nan).view(np.uint16) if dtype == "f16" else np.nan
        blocks = num_blocks + 3
        self.keys = tensor("k", np.full((blocks, num_heads, head_dim, block_size), nan, kind))
        self.values = tensor("v", np.full((blocks, num_heads, block_size, pitch), nan, kind))
        position = np.arange(num_keys)
        slots = self.table[position // block_size] * block_size + position % block_size
        launch(
            lambda p: kv_write.kv_write(
                p, rows_tensor("k", k.reshape(num_keys, -1)),
                rows_tensor("v", v.reshape(num_keys, -1)), tensor("slots", slots.astype(np.int32)),
                self.keys, self.values, counts(num_keys),
            ),
            num_keys,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("num_keys", "num_tokens", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 1, 2), (17, 1, 6, 2, 64), (33, 33, 3, 3, 20), (127, 5, 8, 1, 128)],
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (0, 2.0)])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.tier(
    "sim",
    fast=lambda case: "sim" not in case.device or (case.dtype == "f16" and case.num_keys < 100),
)
def test_attention(
    num_keys: int, num_tokens: int, heads: int, kv_heads: int, head_dim: int,
    window: int, softcap: float, dtype: str,
) -> None:  # fmt: skip
    """Unwritten cache is NaN: one key too many, or a wrong page, shows."""
    rng = np.random.default_rng(6)
    q = rng.standard_normal((num_tokens, heads, head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((num_keys, kv_heads, head_dim)) for _ in range(2))
    if dtype == "f16":
        k, v = k.astype(np.float16), v.astype(np.float16)
    k, v = k.astype(np.float32), v.astype(np.float32)
    cache = _Cache(k, v, 16, dtype)
    out = rows_tensor("out", np.full((num_tokens, heads * head_dim), np.nan, np.float32))
    positions = np.arange(num_keys - num_tokens, num_keys).astype(np.int32)
    launch(
        lambda p: attention.attention(
            p, rows_tensor("q", q.reshape(num_tokens, -1)), cache.keys, cache.values,
            tensor("tables", np.stack([np.full_like(cache.table, -1), cache.table])),
            tensor("rows", np.ones(num_tokens, np.int32)), tensor("positions", positions), out,
            counts(num_tokens), num_heads=heads, scale=head_dim**-0.5, window=window,
            softcap=softcap,
        ),
        num_tokens,
    )  # fmt: skip
    exact, bound = bounds.of_attention(
        q, k, v, bounds.Scoring(head_dim**-0.5, window, softcap),
        is_f16=dtype == "f16" and kernel_launch.device != "cpu",
    )  # fmt: skip
    got = to_host(out)[:, : heads * head_dim].reshape(exact.shape)
    assert (np.abs(got - exact) <= bound + 64 * EPS * np.abs(v).max()).all()


@pytest.mark.parametrize("kind", activation.GATES)
def test_gate(kind: str) -> None:
    rng = np.random.default_rng(7)
    opened, up = (rng.standard_normal((5, 129)).astype(np.float32) * 4 for _ in range(2))
    out = rows_tensor("gate", opened)
    launch(lambda p: activation.gate(p, out, rows_tensor("up", up), kind, counts(5)), 5)
    exact = activation.reference(opened, up, kind)
    got = to_host(out)[:, :129]
    if kind == "clamped":  # up + 1 loses digits where up is near -1
        assert np.max(np.abs(got - exact)) < 32 * EPS * 8
    else:
        assert np.max(np.abs(got - exact) / (np.abs(exact) + 1e-3)) < 32 * EPS


@pytest.mark.parametrize("kind", ["gelu", "relu2"])
def test_activate(kind: str) -> None:
    x = np.random.default_rng(7).standard_normal((5, 129)).astype(np.float32) * 4
    x[4, 0] = np.nan
    out = rows_tensor("x", x)
    launch(lambda p: activation.activate(p, out, kind, counts(5)), 5)
    got = to_host(out)[:, :129]
    assert np.isnan(got[4, 0])
    exact = activation.activated_reference(x, kind)
    assert np.nanmax(np.abs(got - exact) / (np.abs(exact) + 1e-3)) < 32 * EPS


def test_activate_by_the_normal_distribution() -> None:
    """The formula is 7.5e-8 off for each |x|, and rounded some times."""
    x = np.random.default_rng(7).standard_normal((5, 129)).astype(np.float32) * 4
    x[0, :4] = (0, -0.0, 40, -40)
    x[4, 0] = np.nan
    out = rows_tensor("x", x)
    launch(lambda p: activation.activate(p, out, "gelu_erf", counts(5)), 5)
    got = to_host(out)[:, :129]
    assert np.isnan(got[4, 0])
    exact = activation.activated_reference(x, "gelu_erf")
    assert np.nanmax(np.abs(got - exact) - np.abs(x) * (7.5e-8 + 4 * EPS)) <= 0
    tanh = activation.activated_reference(x[1:4], "gelu")
    assert np.abs(tanh - exact[1:4]).max() > 1e-4, "it is another function"


@pytest.mark.parametrize("width", [48, 300])
def test_rows_of_a_table_are_added(width: int) -> None:
    rng = np.random.default_rng(9)
    x, table = (rng.standard_normal((n, width)).astype(np.float32) for n in (4, 7))
    out, ids = rows_tensor("x", x), np.array([6, 0, 6, 3], np.int32)
    launch(
        lambda p: embedding.add_rows(
            p, out, rows_tensor("table", table), tensor("rows", ids), counts(3)
        ),
        4,
    )
    np.testing.assert_array_equal(to_host(out)[:3, :width], (x + table[ids])[:3])
    np.testing.assert_array_equal(to_host(out)[3, :width], x[3])
    add = partial(embedding.add_rows, x=rows_tensor("wide", np.ones((4, 512))), counts=counts(3))
    narrow, all_ids = rows_tensor("table", table), tensor("rows", ids)
    with pytest.raises(LaunchRejected, match="along axis 1"):
        launch(lambda p: add(p, table=narrow, rows=all_ids), 4)


@pytest.mark.parametrize("width", [48, 300])
@pytest.mark.parametrize(("count", "num"), [(0, 2), (1, 3)])
def test_rows_are_taken_and_kept_by_their_numbers(width: int, count: int, num: int) -> None:
    """Those that are live, of which one of the counts says how many; the rest stays as it was."""
    rng = np.random.default_rng(9)
    x, table = (rng.standard_normal((n, width)).astype(np.float32) for n in (4, 7))
    ids, live = tensor("rows", np.array([6, 0, 2, 3], np.int32)), counts(2, 3)
    named = [6, 0, 2][:num]
    source, out, kept = (rows_tensor(*pair) for pair in (("x", x), ("out", x), ("table", table)))
    launch(lambda p: embedding.gather(p, kept, ids, out, live, count=count), 4)
    np.testing.assert_array_equal(to_host(out)[:, :width], np.concatenate([table[named], x[num:]]))
    launch(lambda p: embedding.keep_rows(p, source, ids, kept, live, count=count), 4)
    wanted = table.copy()
    wanted[named] = x[:num]
    np.testing.assert_array_equal(to_host(kept)[:, :width], wanted)


def test_scale_and_softcap_touch_live_rows_only() -> None:
    x = np.random.default_rng(8).standard_normal((3, 100)).astype(np.float32)
    out = rows_tensor("x", x)
    launch(lambda p: activation.scale(p, out, 3.0, counts(2)), 3)
    np.testing.assert_array_equal(to_host(out)[:2, :100], x[:2] * np.float32(3))
    np.testing.assert_array_equal(to_host(out)[2, :100], x[2])
    launch(lambda p: activation.softcap(p, out, 2.0, counts(0, 3), count=1), 3)
    exact = 2 * np.tanh(np.concatenate([x[:2] * 3.0, x[2:]]) / 2)
    np.testing.assert_allclose(to_host(out)[:, :100], exact, atol=1e-6)


def test_a_step_without_tokens_writes_nothing() -> None:
    out = rows_tensor("out", np.full((4, 64), 7.0, np.float32))
    weight = weight_tensor(DType.F32, random_rows(DType.F32, 64, 64), 64)
    launch(
        lambda p: linear.linear(p, rows_tensor("x", np.ones((4, 64))), weight, out, counts(0)),
        4,
    )
    assert (to_host(out) == 7).all()


def test_shapes_that_disagree_are_refused_by_name() -> None:
    weight = weight_tensor(DType.F32, random_rows(DType.F32, 70, 100), 100)
    narrow, wide = (rows_tensor(n, np.zeros((1, c))) for n, c in (("narrow", 64), ("wide", 128)))
    vector = vector_tensor("short", np.zeros(64, np.float32))
    odd, other = (tensor(n, np.zeros((1, 20), np.float32)) for n in ("odd", "other"))
    first = np.zeros(1, np.int32)
    keys, values = (
        tensor(n, np.zeros((2, 1, *s), np.float32)) for n, s in (("k", (20, 16)), ("v", (16, 20)))
    )
    refused = [
        (lambda p: linear.linear(p, narrow, weight, wide, counts(1)), r"x .narrow. has 64 along"),
        (lambda p: linear.linear(p, wide, weight, narrow, counts(1)), r"out .narrow. has 64"),
        (
            lambda p: norm.rms_norm(p, wide, vector, 1e-5, wide, counts(1), width=100),
            r"weight .short. has 64 along axis 0",
        ),
        (lambda p: activation.gate(p, narrow, wide, "silu", counts(1)), r"up .wide. has 128"),
        (lambda p: activation.gate(p, wide, wide, "relu", counts(1)), "relu"),
        (lambda p: activation.softcap(p, wide, 0.0, counts(1)), "cap is 0.0, but must be above 0"),
        (
            lambda p: linear.linear(p, wide, weight, wide, counts(1)),
            "out .wide. and x .wide. share",
        ),
        (
            lambda p: embedding.gather(p, odd, tensor("rows", first), other, counts(0, 1)),
            "width = 20, but rows must be padded to whole vectors",
        ),
        (
            lambda p: embedding.narrow(p, odd, other, counts(0, 1)),
            r"x .odd. has 20 along axis 1, but must be at least",
        ),
        (
            lambda p: kv_write.kv_write(
                p, wide, wide, tensor("slots", first), keys, values, counts(1)
            ),
            "value_pitch = 20, head_dim = 20, but values are written as whole vectors",
        ),
    ]
    for op, message in refused:
        with pytest.raises(LaunchRejected, match=message):
            launch(op, 1)
