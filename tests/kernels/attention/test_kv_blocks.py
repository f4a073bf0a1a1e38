"""Pages of Q8_0 and Q4_0: bytes as GGUF's own package makes them, and attention that reads them
exactly, bit for bit as it reads the same numbers in f32."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from ops import guard_pages
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor, transposed

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import memory
from hypocenter.device.copies import to_host
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention, kv_write, latent_write, rope, rope_write
from hypocenter.kernels.attention.attention_layout import KEYS

KINDS = {DType.Q8_0: GGMLQuantizationType.Q8_0, DType.Q4_0: GGMLQuantizationType.Q4_0}
NUM_KV_HEADS = 3
both = pytest.mark.parametrize("dtype", KINDS)


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_pages.install(monkeypatch)


def _caches(
    dtype: DType, num_blocks: int, head_dim: int, block_size: int, num_heads: int = NUM_KV_HEADS,
    value_dim: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pages of blocks whose bytes are all 0xA5, so that what is left alone shows."""
    heads, value_dim = (num_blocks, num_heads), value_dim or head_dim
    k_shape, v_shape = (*heads, head_dim, block_size), (*heads, block_size, value_dim)
    caches = (
        memory.allocate_blocks("k_cache", "test", dtype, k_shape, along=2),
        memory.allocate_blocks("v_cache", "test", dtype, v_shape, along=3),
    )
    for cache in caches:
        cache.data.view(np.uint8)[:] = 0xA5
    return caches


def _slots(num_tokens: int, num_blocks: int, block_size: int) -> Array:
    order = np.random.default_rng(5).permutation(num_blocks * block_size)
    return order[:num_tokens].astype(np.int32)


def _rows(cache: Tensor, slots: Array) -> Array:
    """Bytes [num_slots, num_heads, num_bytes] of keys or values at these slots."""
    pages = cache.data.view(np.uint8)
    if cache.name == "k_cache":
        pages = pages.swapaxes(2, 3)
    block_size = pages.shape[2]
    return np.stack([pages[slot // block_size, :, slot % block_size] for slot in slots])


def _blocks(x: Array, dtype: DType, num_heads: int = NUM_KV_HEADS) -> Array:
    """The same bytes by GGUF's package, of x [num_tokens, num_heads * head_dim]."""
    found: Array = quantize(x.reshape(len(x), num_heads, -1), KINDS[dtype]).view(np.uint8)
    return found


def _numbers(num_tokens: int, width: int, seed: int) -> Array:
    """Heads of unlike sizes, one of zeros, and some numbers halfway between two codes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-12, 12, (num_tokens, width // 32, 1)))
    x = (rng.standard_normal((num_tokens, width // 32, 32)) * sizes).astype(np.float32)
    x[0, 0] = 0
    halves = rng.integers(-126, 126, 32) + 0.5
    halves[7] = 127  # Q8_0 has a scale of 1
    x[1, 0] = halves
    x[2, 0] = np.where(np.arange(32) % 2, 5.0, -5.0)  # the first of two as large decides in Q4_0
    x[3, 0] = -x[2, 0]
    x[4, 0] = rng.integers(-8, 8, 32) + 0.5
    x[4, 0, 9] = -8  # Q4_0 has a scale of 1
    return x.reshape(num_tokens, width)


@both
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 16), (96, 64), (128, 32)])
def test_bytes_are_those_of_gguf(dtype: DType, head_dim: int, block_size: int) -> None:
    num_tokens, num_blocks = 21, 5
    k, v = (_numbers(num_tokens, NUM_KV_HEADS * head_dim, seed) for seed in (1, 2))
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
    for cache, x in zip(caches, (k, v), strict=True):
        np.testing.assert_array_equal(_rows(cache, slots[:num_live]), _blocks(x, dtype)[:num_live])
        assert (_rows(cache, rest) == 0xA5).all(), "slots of others"


@both
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_block_with_what_is_no_number_is_none(dtype: DType, wrong: float) -> None:
    """NaN must reach the logits, where it ends its request, and no other head."""
    caches = _caches(dtype, 1, 64, 16)
    x = _numbers(6, NUM_KV_HEADS * 64, 3)
    x[5, 64 + 40] = wrong
    launch(
        lambda p: kv_write.kv_write(
            p, rows_tensor("k", x), rows_tensor("v", x), tensor("slots", np.arange(6, dtype="i4")),
            *caches, counts(6),
        ),
        6,
    )  # fmt: skip
    wanted = np.zeros((6, NUM_KV_HEADS, 2), bool)
    wanted[5, 1, 1] = True
    for cache in caches:
        found = _rows(cache, np.arange(6)).reshape(6, NUM_KV_HEADS, 2, -1)
        scales = np.ascontiguousarray(found[..., :2]).view(np.float16)[..., 0]
        np.testing.assert_array_equal(np.isnan(scales), wanted)


@both
def test_latents_lie_behind_what_is_rotated(dtype: DType) -> None:
    rank, num_rotated, slots = 96, 64, _slots(9, 2, 16)
    caches = _caches(dtype, 2, rank + num_rotated, 16, 1, value_dim=rank)
    rotated_part, latent = _numbers(9, num_rotated, 4), _numbers(9, rank, 5)
    launch(
        lambda p: latent_write.latent_write(
            p, rows_tensor("rotated", rotated_part), rows_tensor("latent", latent),
            tensor("slots", slots), *caches, counts(9), rank=rank,
        ),
        9,
    )  # fmt: skip
    key = np.concatenate([rotated_part, latent], axis=1)
    for cache, x in zip(caches, (key, latent), strict=True):
        np.testing.assert_array_equal(_rows(cache, slots), _blocks(x, dtype, 1))


class _Case:
    """Keys and values of one sequence in pages of blocks, and the same numbers in pages of f32."""

    def __init__(
        self, dtype: DType, length: int, group: int, head_dim: int, block_size: int,
        value_dim: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(length)
        self.length, self.group, self.head_dim = length, group, head_dim
        self.num_heads = group * NUM_KV_HEADS
        self.value_dim = value_dim or head_dim
        num_blocks = -(-length // block_size)
        self.table = rng.permutation(num_blocks).astype(np.int32)[None]
        self.blocks = _caches(dtype, num_blocks, head_dim, block_size, value_dim=self.value_dim)
        self.sinks = rng.standard_normal(self.num_heads).astype(np.float32)
        floats = []
        for cache, width in zip(self.blocks, (head_dim, self.value_dim), strict=True):
            shape = (num_blocks * block_size, NUM_KV_HEADS, width)
            # Heads of sizes that tell a scale from that of its neighbour.
            sizes = 1 + rng.integers(0, 4, (*shape[:2], width // 32)).repeat(32, -1)
            raw = quantize(rng.standard_normal(shape).astype(np.float32) * sizes, KINDS[dtype])
            values = dequantize(raw, KINDS[dtype])
            pages, numbers = (
                x.reshape(num_blocks, block_size, NUM_KV_HEADS, -1).swapaxes(1, 2)
                for x in (raw, values)
            )
            if cache.name == "k_cache":
                pages, numbers = pages.swapaxes(2, 3), numbers.swapaxes(2, 3)
            cache.data.view(np.uint8)[:] = pages
            floats.append(transposed(cache.name, np.ascontiguousarray(numbers)))
        self.floats = tuple(floats)
        self.q = rng.standard_normal((length, self.num_heads * head_dim)).astype(np.float32)

    def run(
        self, caches: tuple[Tensor, ...], positions: list[int], window: int = 0,
        softcap: float = 0.0,
    ) -> Array:  # fmt: skip
        num = len(positions)
        out = rows_tensor("out", np.zeros((num, self.num_heads * self.value_dim), np.float32))
        launch(
            lambda p: attention.attention(
                p, rows_tensor("q", self.q[positions]), caches[0], caches[1],
                tensor("table", self.table), tensor("rows", np.zeros(num, np.int32)),
                tensor("at", np.array(positions, "i4")), out, counts(num),
                num_heads=self.num_heads, scale=self.head_dim**-0.5,
                window=window, softcap=softcap, sinks=tensor("sinks", self.sinks),
                value_dim=self.value_dim,
            ),
            num,
        )  # fmt: skip
        return np.array(to_host(out))


@both
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 32), (64, 16), (96, 16), (128, 64)])
def test_attention_reads_them_exactly(
    dtype: DType, group: int, head_dim: int, block_size: int
) -> None:
    """All blocks of heads, tiles and parts of tiles; the sums take the same steps as over f32."""
    length = KEYS + 43
    case = _Case(dtype, length, group, head_dim, block_size)
    positions = [length - 1, KEYS, KEYS - 1, 37, 0]
    found, wanted = (case.run(caches, positions) for caches in (case.blocks, case.floats))
    assert np.isfinite(wanted).all()
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_array_equal(bits(found), bits(wanted))


@both
@pytest.mark.parametrize("settings", [{"window": 40}, {"softcap": 3.0}])
def test_attention_in_a_window_or_capped(dtype: DType, settings: dict[str, float]) -> None:
    case = _Case(dtype, 150, 3, 64, 16)
    positions = list(range(100, 150))
    found, wanted = (
        case.run(caches, positions, **settings)  # type: ignore[arg-type]
        for caches in (case.blocks, case.floats)
    )
    np.testing.assert_array_equal(bits(found), bits(wanted))


@both
def test_values_shorter_than_keys(dtype: DType) -> None:
    case = _Case(dtype, 90, 4, 96, 16, value_dim=32)
    found, wanted = (case.run(caches, [89, 3]) for caches in (case.blocks, case.floats))
    np.testing.assert_array_equal(bits(found), bits(wanted))


@both
def test_an_op_that_turns_keys_as_it_writes_them_refuses_blocks(dtype: DType) -> None:
    caches, x = _caches(dtype, 1, 64, 16), _numbers(5, NUM_KV_HEADS * 64, 6)
    cos, sin = rope.tables(8, 64, 10000.0)
    numbers = np.arange(5, dtype=np.int32)

    def write(plan: PlanBuilder) -> None:
        rope_write.rope_write(
            plan, rows_tensor("q", x), rows_tensor("k", x), rows_tensor("v", x),
            tensor("positions", numbers), tensor("slots", numbers),
            (tensor("cos", cos), tensor("sin", sin)), *caches, counts(5),
            num_heads=NUM_KV_HEADS, head_dim=64, style="neox",
        )  # fmt: skip

    name = dtype.name.lower()
    with pytest.raises(LaunchRejected, match=f"k_cache is {name}, but it is read as f16 or f32"):
        launch(write, 5)


@both
def test_memory_is_whole_blocks(dtype: DType) -> None:
    shape = (2, 3, 64, 16)
    held = memory.allocate_blocks("k_cache", "test", dtype, shape, along=2)
    assert held.shape == shape
    assert held.allocation.num_bytes == 2 * 3 * 16 * dtype.num_bytes(64)
    with pytest.raises(ValueError, match="80 elements do not fill blocks of 32"):
        memory.allocate_blocks("k_cache", "test", dtype, (2, 3, 80, 16), along=2)
