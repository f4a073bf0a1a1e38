"""Attention on a GPU: the same bits in every form, batch, chunk and page size; odd shapes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import bits, counts, launch, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import devices
from hypocenter.device.copies import to_host
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention, attention_gpu
from hypocenter.kernels.attention.attention import TileScratch
from hypocenter.verify import bounds

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    name = devices.open_device("sim:mi300x")
    monkeypatch.setattr(kernel_launch, "device", name)
    return name


@dataclass(frozen=True)
class Sequence:
    k: Array  # [num_keys, num_kv_heads, head_dim]
    v: Array  # [num_keys, num_kv_heads, value_dim]
    q: Array  # [num_keys, num_heads, head_dim]


def sequences(
    lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, dtype: str = "f16"
) -> list[Sequence]:
    rng = np.random.default_rng(len(lengths) + heads)

    def values(*shape: int) -> Array:
        made = rng.standard_normal(shape).astype(np.float32)
        return made.astype(np.float16).astype(np.float32) if dtype == "f16" else made

    return [
        Sequence(
            values(n, kv_heads, head_dim), values(n, kv_heads, head_dim),
            rng.standard_normal((n, heads, head_dim)).astype(np.float32),
        )
        for n in lengths
    ]  # fmt: skip


def pages(given: list[Sequence], block_size: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Caches whose unwritten slots are NaN, pages in a shuffled order; and the block tables."""
    (_, kv_heads, head_dim), value_dim = given[0].k.shape, given[0].v.shape[2]
    counts_ = [-(-len(one.k) // block_size) for one in given]
    order = np.random.default_rng(9).permutation(sum(counts_) + 2)
    keys = np.full((len(order), kv_heads, head_dim, block_size), np.nan, np.float32)
    pitch = -(-value_dim // 16) * 16
    held = np.full((len(order), kv_heads, block_size, pitch), np.nan, np.float32)
    tables = np.full((len(given), max(counts_)), -1, np.int32)
    first = 0
    for row, (one, count) in enumerate(zip(given, counts_, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        at = np.arange(len(one.k))
        page, within = tables[row, at // block_size], at % block_size
        keys[page, :, :, within] = one.k
        held[page, :, within, :value_dim] = one.v
    if dtype == "f16":
        keys, held = (x.astype(np.float16).view(np.uint16) for x in (keys, held))
    return tensor("k_cache", keys), tensor("v_cache", held), tensor("tables", tables)


def attend(
    given: list[Sequence], tokens: list[tuple[int, int]], *, split: bool, dtype: str = "f16",
    block_size: int = 16, window: int = 0, softcap: float = 0.0, spare: int = 0,
    num_sequences: int | None = None, sinks: Array | None = None,
) -> Array:  # fmt: skip
    """Attention of (sequence, position) tokens in one step, [num_tokens, heads * value_dim].

    `spare`: rows of the bucket behind the live ones; they must stay as they are.
    """
    (_, heads, head_dim), value_dim = given[0].q.shape, given[0].v.shape[2]
    keys, values, tables = pages(given, block_size, dtype)
    q = np.stack([given[row].q[position].ravel() for row, position in tokens])
    q = np.concatenate([q, np.full((spare, q.shape[1]), np.nan, np.float32)])
    rows, positions = (np.array(x, np.int32) for x in zip(*tokens, strict=True))
    garbage = np.full(spare, 1 << 20, np.int32)
    out = rows_tensor("out", np.full((len(q), heads * value_dim), 7.0, np.float32))
    partial = None
    if split:
        partial = TileScratch.allocate(
            keys, values, len(q), heads, tables.shape[1], device=kernel_launch.device
        )
    launch(
        lambda p: attention.attention(
            p, rows_tensor("q", q), keys, values, tables,
            tensor("rows", np.concatenate([rows, garbage])),
            tensor("positions", np.concatenate([positions, garbage])), out, counts(len(tokens)),
            num_heads=heads, scale=head_dim**-0.5, window=window, softcap=softcap,
            num_sequences=num_sequences, partial=partial,
            sinks=None if sinks is None else tensor("sinks", sinks), value_dim=value_dim,
        ),
        len(q),
    )  # fmt: skip
    got = to_host(out)[:, : heads * value_dim]
    assert (got[len(tokens) :] == 7).all()
    return got[: len(tokens)]


def exact(
    one: Sequence, window: int = 0, softcap: float = 0.0, sinks: Array | None = None
) -> Array:
    scale = one.q.shape[2] ** -0.5
    found = attention.reference(one.q, one.k, one.v, scale, window, softcap, sinks)
    return found.reshape(len(one.q), -1)


def expected(
    one: Sequence, window: int = 0, softcap: float = 0.0, sinks: Array | None = None,
    dtype: str = "f16",
) -> tuple[Array, Array]:  # fmt: skip
    """What attention comes to, and how far it may be off; both [num_tokens, columns of out]."""
    found = bounds.of_attention(
        one.q,
        one.k,
        one.v,
        bounds.Scoring(one.q.shape[2] ** -0.5, window, softcap, sinks),
        is_f16=dtype == "f16",
    )
    right, bound = (x.reshape(len(one.q), -1) for x in found)
    return right, bound


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(("length", "window"), [(70, 0), (90, 33)])
@pytest.mark.tier("sim", fast=lambda case: case.dtype == "f16" and case.window)
def test_sinks_take_their_part_in_both_forms(length: int, window: int, dtype: str) -> None:
    given = sequences((length,), 6, 2, 24, dtype)
    tokens = [(0, position) for position in (0, 16, length // 2, length - 1)]
    sinks = np.array([-2.0, 0.0, 1.5, 3.0, -200.0, 200.0], np.float32)
    options: dict[str, Any] = {"dtype": dtype, "window": window, "sinks": sinks}
    whole, split = (attend(given, tokens, split=form, spare=2, **options) for form in (False, True))
    assert (bits(whole) == bits(split)).all()
    at = [position for _, position in tokens]
    right, bound = (x[at] for x in expected(given[0], window, sinks=sinks, dtype=dtype))
    assert (np.abs(whole - right) <= bound).all()
    assert (whole[:, 5 * 24 :] == 0).all(), "all is the sink's"
    without = attend(given, tokens, split=True, dtype=dtype, window=window)
    assert np.abs(without - whole).max() > 100 * bound.max()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "window", "softcap"),
    [
        (70, 3, 1, 80, 0, 0.0),
        (70, 6, 2, 96, 9, 0.0),
        (40, 2, 2, 256, 0, 2.0),
        (20, 20, 1, 16, 0, 0.0),
        (130, 1, 1, 3, 65, 0.0),
    ],
)
@pytest.mark.tier("sim", fast=lambda case: case.dtype == "f16")
def test_both_forms_give_the_same_bits_within_the_bound(
    length: int, heads: int, kv_heads: int, head_dim: int, window: int, softcap: float, dtype: str
) -> None:
    given = sequences((length,), heads, kv_heads, head_dim, dtype)
    tokens = [(0, position) for position in (0, 16, length // 2, length - 2, length - 1)]
    options: dict[str, Any] = {"dtype": dtype, "window": window, "softcap": softcap}
    whole, split = (attend(given, tokens, split=form, spare=2, **options) for form in (False, True))
    assert (bits(whole) == bits(split)).all()
    at = [position for _, position in tokens]
    right, bound = (x[at] for x in expected(given[0], window, softcap, dtype=dtype))
    assert (np.abs(whole - right) <= bound).all()
    # One key less, or one more, is far outside of it.
    wrong = exact(Sequence(given[0].k[:-1], given[0].v[:-1], given[0].q[1:]), window, softcap)
    assert (np.abs(wrong[-1] - right[-1]) / bound[-1]).max() > 20


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim"), [(3, 40, 32), (5, 80, 16), (9, 576, 512)]
)
@pytest.mark.tier("sim", fast=lambda case: case.head_dim == 40)
def test_values_shorter_than_keys(heads: int, head_dim: int, value_dim: int, dtype: str) -> None:
    """Columns of keys that values have not got count for the scores alone."""
    (one,) = sequences((40,), heads, 1, head_dim, dtype)
    given = Sequence(one.k, one.v[:, :, :value_dim], one.q)
    tokens = [(0, position) for position in (0, 17, 39)]
    whole, split = (attend([given], tokens, split=form, dtype=dtype) for form in (False, True))
    assert (bits(whole) == bits(split)).all()
    right, bound = (x[[0, 17, 39]] for x in expected(given, dtype=dtype))
    assert (np.abs(whole - right) <= bound).all()
    cut = Sequence(one.k * (np.arange(head_dim) < value_dim), given.v, one.q)
    assert (np.abs(exact(cut)[39] - right[2]) / bound[2]).max() > 20


@pytest.mark.parametrize("position", [62, 63, 64])
def test_a_token_at_the_end_of_a_tile_sees_no_later_key(position: int) -> None:
    """Tiles of 64 keys are compared with its position only where they reach beyond it."""
    (given,) = sequences((66,), 2, 1, 16)
    right, bound = (x[position] for x in expected(given))
    for split in (False, True):
        got = attend([given], [(0, position)], split=split)[0]
        assert (np.abs(got - right) <= bound).all(), split


def test_bits_do_not_depend_on_batch_chunk_page_size_or_form() -> None:
    given = sequences((150, 70, 1, 33), 2, 1, 16)
    alone = [attend([one], [(0, p) for p in range(len(one.k))], split=False) for one in given]
    mixed = [(3, 32), (0, 149), (0, 148), (1, 69), (2, 0), (1, 68), (0, 147), (3, 31), (0, 63)]
    want = np.stack([alone[row][position] for row, position in mixed])
    for split, block_size in ((False, 16), (True, 128)):
        got = attend(given, mixed, split=split, block_size=block_size)
        assert (bits(got) == bits(want)).all(), (split, block_size)
    chunk = [(0, position) for position in range(131, 150)]
    assert (bits(attend(given, chunk, split=False, num_sequences=1)) == bits(alone[0][131:])).all()


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.tier("sim", fast=lambda case: case.rows == 32)
def test_bits_do_not_depend_on_how_a_kernel_is_cut(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sequences((90,), 6, 2, 20)
    tokens = [(0, position) for position in (89, 3, 64, 63)]
    want = attend(given, tokens, split=True)
    form = attention_gpu.Form(rows, 4, 1)
    monkeypatch.setattr(attention_gpu, "whole_form", lambda *_: form)
    monkeypatch.setattr(attention_gpu, "split_form", lambda *_: form)
    monkeypatch.setattr(attention_gpu, "_PROGRAMS", 1)  # a program takes every tile
    for split in (False, True):
        assert (bits(attend(given, tokens, split=split)) == bits(want)).all()


@pytest.mark.parametrize(
    ("is_h100", "is_wide", "kv_dtype", "rows", "num_warps"),
    [
        (True, False, DType.F16, 64, 4),
        (True, True, DType.F16, 64, 4),
        (True, False, DType.Q8_0, 32, 8),
        (False, False, DType.F16, 64, 4),
        (False, True, DType.F16, 64, 8),
        (False, True, DType.Q4_0, 32, 8),
    ],
)
def test_an_h100_takes_the_forms_timed_there_and_others_those_that_have_registers(
    is_h100: bool, is_wide: bool, kv_dtype: DType, rows: int, num_warps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention_gpu, "has_wide_tiles", lambda _: is_h100)
    usual = attention_gpu.whole_form(128, 1, "cuda:0")
    found = attention_gpu.roomy_form(usual, 32, kv_dtype, "cuda:0", is_wide=is_wide)
    assert (found.rows, found.num_warps) == (rows, num_warps)


def test_large_and_small_queries_keep_their_accuracy() -> None:
    """f16 holds neither 1e6 nor 1e-9; rows of a tile differ by far."""
    given = sequences((40,), 4, 1, 64)
    size = np.array([1e6, 1.0, 1e-3, 1e-9], np.float32)[:, None]
    loud = Sequence(given[0].k, given[0].v, given[0].q * size)
    got = attend([loud], [(0, 39)], split=True)
    right, bound = (x[-1] for x in expected(loud))
    # At 1e6 a score's own rounding decides: only the quieter heads have a bound of their own.
    assert (np.abs(got[0] - right) <= bound)[64:].all()
    assert np.isfinite(got).all()


def _of_four_heads(tensors: tuple[Any, ...], partial: TileScratch, plan: PlanBuilder) -> None:
    attention.attention(plan, *tensors, num_heads=4, scale=1.0, partial=partial)


def test_a_partial_that_is_too_small_is_refused() -> None:
    given = sequences((40,), 4, 1, 64)
    keys, values, tables = pages(given, 16, "f16")
    q, out = (rows_tensor(name, np.zeros((2, 256), np.float32)) for name in ("q", "out"))
    ints = [tensor(name, np.zeros(2, np.int32)) for name in ("rows", "positions")]
    tensors = (q, keys, values, tables, *ints, out, counts(2))
    for num_tokens, num_blocks, message in ((1, 3, "room for its tiles"), (2, 0, "needs a tile")):
        partial = TileScratch.allocate(
            keys, values, num_tokens, 4, num_blocks, device=kernel_launch.device
        )
        with pytest.raises(LaunchRejected, match=message):
            launch(functools.partial(_of_four_heads, tensors, partial), 2)
