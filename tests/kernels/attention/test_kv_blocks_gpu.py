"""Pages of Q8_0 and Q4_0 on a GPU: the bytes that GGUF's package makes, and attention that has the
bits that it has over an f16 cache of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from ops import kernel_launch
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor
from test_kv_blocks import KINDS, _blocks, _numbers, _slots

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.kernels.attention import attention, kv_write, latent_write, rope, rope_write
from hypocenter.kernels.attention.attention import TileScratch

NUM_KV_HEADS = 3
both = pytest.mark.parametrize("dtype", KINDS)


@pytest.fixture(autouse=True, params=["sim:mi300x", "sim:h200"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = devices.open_device(request.param)
    monkeypatch.setattr(kernel_launch, "device", name)
    return name


def _caches(
    dtype: DType, num_blocks: int, head_dim: int, block_size: int, num_heads: int = NUM_KV_HEADS,
    value_dim: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pages of blocks whose bytes are all 0xA5."""
    heads, where = (num_blocks, num_heads), kernel_launch.device
    k_shape, v_shape = (*heads, head_dim, block_size), (*heads, block_size, value_dim or head_dim)
    made = (
        memory.allocate_blocks("k_cache", "test", dtype, k_shape, along=2, device=where),
        memory.allocate_blocks("v_cache", "test", dtype, v_shape, along=3, device=where),
    )
    for cache in made:
        _fill(cache, np.full(cache.allocation.num_bytes, 0xA5, np.uint8))
    return made


def _fill(cache: Tensor, raw: Array) -> None:
    copies.to_device(memory.as_bytes(cache), np.ascontiguousarray(raw).reshape(-1))


def _rows(cache: Tensor, slots: Array) -> Array:
    """Bytes [num_slots, num_heads, num_bytes] of keys or values at these slots."""
    raw, (num_blocks, num_heads) = copies.to_host(memory.as_bytes(cache)), cache.shape[:2]
    if cache.name == "k_cache":
        pages = raw.reshape(num_blocks, num_heads, -1, cache.shape[3]).swapaxes(2, 3)
    else:
        pages = raw.reshape(num_blocks, num_heads, cache.shape[2], -1)
    size = pages.shape[2]
    return np.stack([pages[slot // size, :, slot % size] for slot in slots])


@both
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 32), (96, 16)])
def test_bytes_are_those_of_gguf(dtype: DType, head_dim: int, block_size: int) -> None:
    num_tokens, num_blocks = 9, 4
    k, v = (_numbers(num_tokens, NUM_KV_HEADS * head_dim, seed) for seed in (1, 2))
    v[6, 40], k[6, 3] = np.nan, -np.inf
    caches = _caches(dtype, num_blocks, head_dim, block_size)
    slots, num_live = _slots(num_tokens, num_blocks, block_size), num_tokens - 2
    launch(
        lambda p: kv_write.kv_write(
            p, rows_tensor("k", k, np.nan), rows_tensor("v", v, np.nan), tensor("slots", slots),
            *caches, counts(num_live),
        ),
        num_tokens,
    )  # fmt: skip
    rest = np.setdiff1d(np.arange(num_blocks * block_size), slots[:num_live])
    for cache, x, column in zip(caches, (k, v), (3, 40), strict=True):
        x[6, column], at = 0, column // 32
        found, wanted = _rows(cache, slots[:num_live]), _blocks(x, dtype)[:num_live]
        size, head = dtype.block_bytes, column // head_dim
        begin = at * 32 % head_dim // 32 * size
        scale = np.ascontiguousarray(found[6, head, begin : begin + 2]).view(np.float16)
        assert np.isnan(scale), "what is no number must reach the logits"
        found[6, head, begin : begin + size] = wanted[6, head, begin : begin + size]
        np.testing.assert_array_equal(found, wanted)
        assert (_rows(cache, rest) == 0xA5).all(), "slots of others"


@both
def test_latents_lie_behind_what_is_rotated(dtype: DType) -> None:
    rank, num_rotated, slots = 96, 64, _slots(7, 2, 16)
    caches = _caches(dtype, 2, rank + num_rotated, 16, 1, value_dim=rank)
    rotated_part, latent = _numbers(7, num_rotated, 4), _numbers(7, rank, 5)
    launch(
        lambda p: latent_write.latent_write(
            p, rows_tensor("rotated", rotated_part), rows_tensor("latent", latent),
            tensor("slots", slots), *caches, counts(7), rank=rank,
        ),
        7,
    )  # fmt: skip
    key = np.concatenate([rotated_part, latent], axis=1)
    for cache, x in zip(caches, (key, latent), strict=True):
        np.testing.assert_array_equal(_rows(cache, slots), _blocks(x, dtype, 1))


def _pages(kind: GGMLQuantizationType, cache: Tensor, seed: int) -> Tensor:
    """Fill a cache with blocks of random numbers; these, rounded to f16, as pages of f16."""
    num_blocks, num_heads, *size = cache.shape
    is_key = cache.name == "k_cache"
    rows, width = size[::-1] if is_key else size
    rng = np.random.default_rng(seed)
    sizes = 1 + rng.integers(0, 4, (num_blocks, num_heads, rows, width // 32)).repeat(32, -1)
    values = rng.standard_normal((num_blocks, num_heads, rows, width)).astype(np.float32)
    raw = quantize((values * sizes).astype(np.float32), kind)
    numbers = dequantize(raw, kind).astype(np.float16).view(np.uint16)
    if is_key:
        raw, numbers = raw.swapaxes(2, 3), numbers.swapaxes(2, 3)
    _fill(cache, raw.view(np.uint8) if raw.flags.c_contiguous else np.array(raw))
    return tensor(cache.name, np.ascontiguousarray(numbers))


@both
@pytest.mark.parametrize(
    ("group", "head_dim", "value_dim", "block_size", "settings"),
    [
        (2, 32, 32, 16, {}),
        (4, 96, 96, 32, {"window": 30}),
        (1, 288, 256, 16, {"softcap": 3.0}),
    ],
)
# One vendor for each type; a window on one of them.
@pytest.mark.tier(
    "sim",
    fast=lambda case: (
        (case.dtype is DType.Q8_0) == (case.device == "sim:h200")
        and (not case.settings or case.dtype is DType.Q8_0)
        and case.value_dim == case.head_dim
    ),
)
def test_attention_reads_them_as_f16(
    dtype: DType, group: int, head_dim: int, value_dim: int, block_size: int,
    settings: dict[str, float], device: str,
) -> None:  # fmt: skip
    num_blocks, num_heads = 96 // block_size, group * NUM_KV_HEADS
    rng = np.random.default_rng(7)
    table = rng.permutation(num_blocks).astype(np.int32)[None]
    blocks = _caches(dtype, num_blocks, head_dim, block_size, value_dim=value_dim)
    halves = [_pages(KINDS[dtype], cache, seed) for seed, cache in enumerate(blocks)]
    positions = np.array([95, 64, 40, 0], np.int32)
    q = rng.standard_normal((4, num_heads * head_dim)).astype(np.float32)
    sinks = rng.standard_normal(num_heads).astype(np.float32)

    def attend(k_cache: Tensor, v_cache: Tensor, *, split: bool) -> Array:
        out = rows_tensor("out", np.zeros((4, num_heads * value_dim), np.float32))
        scratch = TileScratch.allocate(k_cache, v_cache, 4, num_heads, num_blocks, device=device)
        launch(
            lambda p: attention.attention(
                p, rows_tensor("q", q), k_cache, v_cache, tensor("table", table),
                tensor("rows", np.zeros(4, np.int32)), tensor("positions", positions), out,
                counts(4), num_heads=num_heads, scale=head_dim**-0.5,
                partial=scratch if split else None, sinks=tensor("sinks", sinks),
                value_dim=value_dim, **settings,  # type: ignore[arg-type]
            ),
            4,
        )  # fmt: skip
        return np.array(copies.to_host(out))

    wanted = attend(*halves, split=False)
    assert np.isfinite(wanted).all()
    assert np.abs(wanted).max() > 0.5
    for split in (False, True):
        found = attend(*blocks, split=split)
        np.testing.assert_array_equal(bits(found), bits(wanted))


@both
def test_an_op_that_turns_keys_as_it_writes_them_refuses_blocks(dtype: DType) -> None:
    caches, x = _caches(dtype, 1, 64, 16), _numbers(5, NUM_KV_HEADS * 64, 6)
    cos, sin = rope.tables(8, 64, 10000.0)
    at = tensor("at", np.arange(5, dtype=np.int32))
    given = [rows_tensor(name, x) for name in "qkv"]
    name = dtype.name.lower()
    with pytest.raises(LaunchRejected, match=f"k_cache is {name}, but it is read as f16 or f32"):
        launch(
            lambda p: rope_write.rope_write(
                p, given[0], given[1], given[2], at, at, (tensor("cos", cos), tensor("sin", sin)),
                caches[0], caches[1], counts(5),
                num_heads=NUM_KV_HEADS, head_dim=64, style="neox",
            ),
            5,
        )  # fmt: skip
