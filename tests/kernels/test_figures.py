"""Figures that devices make of tensors, and keys and values read back, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, launch, tensor

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, digests, memory
from hypocenter.device.cpu.measuring import figures_of, figures_of_words
from hypocenter.device.digests import BLOCK, NUM_WORDS
from hypocenter.kernels.attention.kv_read import kv_read
from hypocenter.kernels.attention.kv_write import kv_write
from hypocenter.kernels.rowwise.figures import join_figures, measure, num_parts_of

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["cpu", "sim:mi300x"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name != "cpu":
        devices.open_device(name)
    monkeypatch.setattr(kernel_launch, "device", name)
    return name


def digest_of(values: Array) -> str:
    """The digest by `device/digests.py`, in numpy."""
    mix = np.arange(values.size, dtype=np.uint32)
    factors = (digests.FIRST, digests.SECOND, 1)
    for shift, factor in zip(digests.SHIFTS, factors, strict=True):
        mix = (mix ^ (mix >> np.uint32(shift))) * np.uint32(factor)
    bits = values.reshape(-1).view(np.uint32).astype(np.uint64)
    total = (bits * (mix | np.uint32(1)).astype(np.uint64)).sum(dtype=np.uint64)
    return f"{int(total):016x}"


def _room(name: str, *shape: int, device: str, dtype: DType = DType.I64) -> Tensor:
    return memory.allocate(name, "test", dtype, shape, device=device)


def _measured(tensors: list[tuple[Array, int]], num_live: int, device: str) -> Array:
    """The words of each of some tensors f32 [num_rows, >= width] with its width."""
    num_rows = len(tensors[0][0])
    each = num_parts_of(num_rows, max(width for _, width in tensors))
    parts = _room("parts", each * len(tensors), NUM_WORDS, device=device)
    figures = _room("figures", len(tensors), NUM_WORDS, device=device)
    firsts = tensor("firsts", np.arange(len(tensors) + 1, dtype=np.int32) * each)
    placed = [(tensor("x", values), width) for values, width in tensors]
    launch(lambda p: measure(p, placed, parts, counts(num_live, 9)), num_rows)
    launch(lambda p: join_figures(p, parts, firsts, figures), num_rows)
    return copies.to_host(figures)


def _values(num_rows: int, width: int, seed: int = 0) -> Array:
    padded = -(-width // 16) * 16
    return np.random.default_rng(seed).standard_normal((num_rows, padded)).astype(np.float32)


@pytest.mark.parametrize(
    ("num_rows", "num_live", "width"),
    [(1, 1, 1), (3, 2, 77), (3, 0, 64), (2, 2, BLOCK), (2, 2, BLOCK + 17), (150, 140, 40)],
)
def test_figures_of_a_tensor(num_rows: int, num_live: int, width: int, device: str) -> None:
    values = _values(num_rows, width)
    if num_live > 1 and width > 32:
        values[0, 5], values[1, 8], values[1, 30] = np.nan, -np.inf, np.inf
    live = values[:num_live, :width]
    found = figures_of_words(_measured([(values, width)], num_live, device), [live.size])
    assert found.digests == digest_of(np.ascontiguousarray(live))
    finite = live[np.isfinite(live)].astype(np.float64)
    assert found.num_nan == [int(np.isnan(live).sum())]
    assert found.num_inf == [int(np.isinf(live).sum())]
    if not finite.size:
        assert (found.low, found.high, found.mean, found.rms) == ([0], [0], [0], [0])
        return
    assert (found.low[0], found.high[0]) == (finite.min(), finite.max())
    rms = np.sqrt((finite**2).mean())
    np.testing.assert_allclose(found.rms[0], rms, rtol=1e-6)
    np.testing.assert_allclose(found.mean[0], finite.mean(), rtol=0, atol=1e-6 * rms)
    wanted = figures_of(np.ascontiguousarray(live)[None]).sketches
    np.testing.assert_allclose(found.sketches, wanted, rtol=0, atol=2e-6 * rms)


@pytest.mark.parametrize("num_tensors", [2, 5])
def test_several_tensors_of_a_launch(num_tensors: int, device: str) -> None:
    widths = (48, BLOCK + 64, 16, 80, 33)[:num_tensors]
    tensors = [(_values(3, width, seed), width) for seed, width in enumerate(widths)]
    words = _measured(tensors, 2, device)
    for (values, width), of_one in zip(tensors, words, strict=True):
        live = np.ascontiguousarray(values[:2, :width])
        found = figures_of_words(of_one[None], [live.size])
        assert found.digests == digest_of(live)
        assert found.low[0] == live.min()


def test_a_digest_sees_any_bit_at_any_place(device: str) -> None:
    values = _values(2, 96)
    seen = {figures_of_words(_measured([(values, 96)], 2, device), [192]).digests}
    for place in ((0, 0), (0, 95), (1, 17)):
        changed = values.copy()
        changed.view(np.uint32)[place] ^= 1
        seen.add(figures_of_words(_measured([(changed, 96)], 2, device), [192]).digests)
    exchanged = values[::-1].copy()
    seen.add(figures_of_words(_measured([(exchanged, 96)], 2, device), [192]).digests)
    assert len(seen) == 5


def test_keys_and_values_are_read_back(device: str) -> None:
    rng = np.random.default_rng(0)
    num_tokens, num_heads, head_dim, value_dim, block_size = 3, 2, 24, 20, 16
    slots = tensor("slots", np.array([37, 5, 16], np.int32))
    given = [rng.standard_normal((num_tokens, 48)).astype(np.float32) for _ in range(2)]
    shapes = (4, num_heads, head_dim, block_size), (4, num_heads, block_size, 32)
    caches = [_room("cache", *shape, device=device, dtype=DType.F16) for shape in shapes]
    k, v = (tensor("x", values) for values in given)
    live = counts(2, 0)
    launch(lambda p: kv_write(p, k, v, slots, caches[0], caches[1], live), num_tokens)
    out = [tensor("out", np.full((num_tokens, 48), 7, np.float32)) for _ in range(2)]
    pair = caches[0], caches[1]
    launch(lambda p: kv_read(p, pair, slots, out[0], out[1], live, value_dim=value_dim), num_tokens)
    keys, values = (copies.to_host(one) for one in out)
    halves = [one[:2].astype(np.float16).astype(np.float32) for one in given]
    np.testing.assert_array_equal(keys[:2], halves[0])
    by_head = halves[1].reshape(2, num_heads, head_dim)[..., :value_dim]
    np.testing.assert_array_equal(values[:2, : num_heads * value_dim], by_head.reshape(2, -1))
    assert (keys[2] == 7).all()
    assert (values[2] == 7).all()
