"""Attention on the CPU beyond one tile of keys: against float64, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ops import guard_pages
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor, transposed

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import memory
from hypocenter.device.copies import to_host
from hypocenter.device.cpu.threads import max_num_threads, set_num_threads
from hypocenter.device.cpu.whole_kernels import compile_whole
from hypocenter.kernels.attention import attention, attention_cpu, attention_tile_cpu
from hypocenter.kernels.attention.attention_layout import KEYS, MANY_PAIRS, num_part_floats
from hypocenter.kernels.attention.attention_tile_cpu import NEXT, find_strips

EPS = 2.0**-24
_num_starts: Callable[[int], int] = attention_tile_cpu.num_starts.py_func  # type: ignore[attr-defined]
#: A token is a sequence and its position in it.
Tokens = list[tuple[int, int]]


@compile_whole
def _find_strips(
    starts: Array, at: int, tile: int, position: int, window: int, tables: Array, k: Array,
    v: Array, kv_head: int,
) -> None:  # fmt: skip
    find_strips(starts, at, tile, position, window, tables, 0, k, v, kv_head)


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_pages.install(monkeypatch)


@dataclass
class _Case:
    """Sequences of `lengths` keys; unwritten cache is NaN and unused table entries are -1."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "f16"
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    #: 0: values are as long as keys.
    value_dim: int = 0
    lay: Callable[[str, Array], Tensor] = transposed
    k: list[Array] = field(init=False)
    v: list[Array] = field(init=False)
    q: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.head_dim)
        self.value_dim = self.value_dim or self.head_dim
        kind = np.float16 if self.dtype == "f16" else np.float32

        def rows(num_heads: int) -> list[Array]:
            shapes = [(length, num_heads, self.head_dim) for length in self.lengths]
            return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

        self.q = rows(self.num_heads)
        self.k, self.v = ([x.astype(kind) for x in rows(self.num_kv_heads)] for _ in "kv")
        self.v = [x[:, :, : self.value_dim] for x in self.v]
        #: The last one alone decides.
        self.sinks = 2 * rng.standard_normal(self.num_heads).astype(np.float32)
        self.sinks[-1] = 200

    def exact(self, sequence: int, position: int) -> Array:
        """[num_heads, value_dim] in float64."""
        seen, q = slice(position + 1), self.q[sequence][position : position + 1]
        k, v = (x[sequence][seen].astype(np.float32) for x in (self.k, self.v))
        scale = self.head_dim**-0.5
        sinks = self.sinks if self.has_sinks else None
        found: Array = attention.reference(q, k, v, scale, self.window, self.softcap, sinks)[0]
        return found

    def run(
        self, tokens: Tokens, block_size: int = 16, parts: Tensor | None = None, num_rows: int = 0
    ) -> Array:
        """[len(tokens), num_heads, value_dim] through the op, in a bucket of `num_rows`."""
        width = max(-(-length // block_size) for length in self.lengths)
        tables = np.full((len(self.lengths), width), -1, np.int32)
        num_blocks = len(self.lengths) * width
        free = iter(np.random.default_rng(1).permutation(num_blocks).tolist())
        kind, pitch = self.k[0].dtype, -(-self.value_dim // 16) * 16
        pages = (num_blocks, self.num_kv_heads, block_size)
        k, v = (
            np.full((*pages, self.head_dim), np.nan, kind),
            np.full((*pages, pitch), np.nan, kind),
        )
        for row, length in enumerate(self.lengths):
            for start in range(0, length, block_size):
                block, part = next(free), slice(start, start + block_size)
                tables[row, start // block_size] = block
                count = len(self.k[row][part])
                k[block, :, :count] = self.k[row][part].swapaxes(0, 1)
                v[block, :, :count, : self.value_dim] = self.v[row][part].swapaxes(0, 1)
        caches = [np.ascontiguousarray(k.swapaxes(2, 3)), v]
        if self.dtype == "f16":
            caches = [cache.view(np.uint16) for cache in caches]
        q = np.stack([self.q[row][position].ravel() for row, position in tokens])
        size = (len(tokens), self.num_heads * self.value_dim)
        out = rows_tensor("out", np.full(size, np.nan, np.float32))
        rows, positions = np.array(tokens, np.int32).T
        launch(
            lambda p: attention.attention(
                p, rows_tensor("q", q), self.lay("k", caches[0]), self.lay("v", caches[1]),
                tensor("tables", tables), tensor("rows", np.ascontiguousarray(rows)),
                tensor("positions", np.ascontiguousarray(positions)), out, counts(len(tokens)),
                num_heads=self.num_heads, scale=self.head_dim**-0.5, window=self.window,
                softcap=self.softcap, parts=parts,
                sinks=tensor("sinks", self.sinks) if self.has_sinks else None,
                value_dim=self.value_dim,
            ),
            num_rows or len(tokens),
        )  # fmt: skip
        found = to_host(out)[:, : size[1]]
        return np.array(found).reshape(len(tokens), self.num_heads, self.value_dim)


@pytest.fixture(autouse=True)
def _many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that KV heads are never shared evenly, and pairs that are few are cut into tiles."""
    monkeypatch.setattr(attention, "num_threads", lambda: 17)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [0, 40])
def test_sinks(group: int, window: int) -> None:
    """Whether one item takes all tiles of a pair, or another kernel folds them."""
    case = _Case((KEYS + 37,), 2 * group, 2, 20, window=window, has_sinks=True)
    tokens = [(0, 0), (0, 30), (0, KEYS - 1), (0, KEYS), (0, KEYS + 36)]
    _assert_exact(case, tokens)
    assert (
        case.run(tokens, parts=memory.allocate("none", "test", DType.F32, (0,))) == case.run(tokens)
    ).all()
    sound, case.has_sinks = case.run(tokens), False
    assert np.abs(sound - case.run(tokens)).max() > 0.1


def _assert_exact(case: _Case, tokens: Tokens) -> None:
    largest = max(np.abs(v.astype(np.float64)).max() for v in case.v)
    for found, (row, position) in zip(case.run(tokens), tokens, strict=True):
        assert np.max(np.abs(found - case.exact(row, position))) <= 64 * EPS * largest


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16])
def test_groups_of_heads(group: int, dtype: str) -> None:
    """Blocks of one, four and eight heads, full or padded, one or several to a group."""
    case = _Case((KEYS + 37,), 2 * group, 2, 20, dtype)
    _assert_exact(case, [(0, 0), (0, 15), (0, 16), (0, KEYS - 1), (0, KEYS), (0, KEYS + 36)])


@pytest.mark.parametrize(
    ("group", "head_dim", "value_dim"), [(1, 40, 32), (5, 66, 20), (16, 576, 512)]
)
def test_values_shorter_than_keys(group: int, head_dim: int, value_dim: int) -> None:
    case = _Case((KEYS + 9,), group, 1, head_dim, value_dim=value_dim)
    _assert_exact(case, [(0, KEYS + 8), (0, KEYS), (0, 31)])
    whole = case.run([(0, KEYS + 8)], parts=tensor("parts", np.zeros(0, np.float32)))
    assert (bits(case.run([(0, KEYS + 8)])) == bits(whole)).all(), "in tiles and at once"


@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_sizes_of_heads(head_dim: int, group: int) -> None:
    _assert_exact(_Case((70,), group, 1, head_dim), [(0, 69), (0, 31)])


@pytest.mark.parametrize("window", [1, 17, KEYS, KEYS + 1])
@pytest.mark.parametrize("group", [1, 4])
def test_windows_that_begin_in_another_tile(window: int, group: int) -> None:
    case = _Case((2 * KEYS + 70,), group, 1, 64, window=window, softcap=3.0)
    _assert_exact(case, [(0, p) for p in (5, KEYS - 1, KEYS, KEYS + 15, 2 * KEYS + 69)])


def test_scores_far_apart_fold_without_overflow() -> None:
    """The largest score of all, in the first, the middle or the last tile, takes everything."""
    length = 3 * KEYS
    for place in (3, KEYS + 1, length - 1):
        case = _Case((length,), 4, 1, 16, "f32")
        case.q[0][:] = 30
        case.k[0][:] = -30
        case.k[0][place] = 30
        np.testing.assert_array_equal(case.run([(0, length - 1)])[0], case.v[0][[place] * 4, 0])


LENGTHS = (3 * KEYS + 5, 40, KEYS, KEYS + 1, 2 * KEYS - 3)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window"), [(14, 2, 0), (3, 3, 700)])
def test_a_token_has_its_bits_in_any_company_on_any_pages(
    num_heads: int, num_kv_heads: int, window: int
) -> None:
    """Alone its tiles are items of their own; in company one item folds them all."""
    case = _Case(LENGTHS, num_heads, num_kv_heads, 64, window=window)
    tokens = [(row, length - 1) for row, length in enumerate(LENGTHS)]
    alone = np.concatenate([case.run([token]) for token in tokens])
    assert num_kv_heads < MANY_PAIRS
    some = case.run(tokens[:2])
    np.testing.assert_array_equal(bits(some), bits(alone[:2]))
    chunk = [(0, position) for position in range(LENGTHS[0] - 9, LENGTHS[0] - 1)]
    together = case.run(chunk + tokens)
    assert len(chunk + tokens) * num_kv_heads >= MANY_PAIRS
    np.testing.assert_array_equal(bits(together[len(chunk) :]), bits(alone))
    for block_size in (32, 128):
        for case.lay in (tensor, transposed):
            paged = case.run(chunk + tokens, block_size)
            np.testing.assert_array_equal(bits(paged), bits(together))


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_threads_change_no_bit(num_tokens: int) -> None:
    case = _Case((2 * KEYS + 9,), 6, 2, 64)
    tokens = [(0, 2 * KEYS + 8 - index) for index in range(num_tokens)]
    found = []
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        found.append(case.run(tokens))
    set_num_threads(max_num_threads())
    np.testing.assert_array_equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize(("num_threads", "is_cut"), [(1, False), (2, False), (3, True), (4, True)])
def test_pairs_are_cut_where_threads_would_have_unlike_shares(
    num_threads: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _Case((2 * KEYS + 9,), 6, 2, 64)
    last, parts = [(0, 2 * KEYS + 8)], np.full(num_part_floats(1, 6, 2, 64, 2 * KEYS + 16), np.nan)
    wanted = case.run(last)
    monkeypatch.setattr(attention, "num_threads", lambda: num_threads)
    scratch = tensor("parts", parts.astype(np.float32))
    np.testing.assert_array_equal(bits(case.run(last, parts=scratch)), bits(wanted))
    assert np.isnan(to_host(scratch)).all() == (not is_cut)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_scratch_too_small_for_the_tiles_is_left_alone(is_empty: bool) -> None:
    """Then each pair finishes by itself, with the same bits."""
    case = _Case((2 * KEYS + 9,), 6, 2, 64)
    last = [(0, 2 * KEYS + 8)]
    num_floats = num_part_floats(1, 6, 2, 64, 2 * KEYS + 9)
    small = tensor("parts", np.full(0 if is_empty else num_floats - 1, np.nan, np.float32))
    np.testing.assert_array_equal(bits(case.run(last, parts=small)), bits(case.run(last)))
    assert np.isnan(to_host(small)).all()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 15, 16])
def test_a_step_in_a_wide_bucket_has_the_same_bits(num_kv_heads: int) -> None:
    """A bucket that may hold few pairs has a fold, and room for them; others want none."""
    case = _Case((2 * KEYS + 9,), num_kv_heads, num_kv_heads, 16)
    last = [(0, 2 * KEYS + 8)]
    alone = bits(case.run(last))
    for num_rows in (2, 8, 16, 32):
        np.testing.assert_array_equal(bits(case.run(last, num_rows=num_rows)), alone)


def test_what_a_token_may_not_see_does_not_reach_it() -> None:
    """Later keys of its own page are NaN and Inf; so is the head of another group."""
    case = _Case((KEYS + 30,), 8, 2, 64)
    clean = case.run([(0, KEYS + 3)])
    case.k[0][KEYS + 4 :], case.v[0][KEYS + 4 :] = np.nan, np.inf
    case.v[0][:, 1] = np.nan
    found = case.run([(0, KEYS + 3)])
    np.testing.assert_array_equal(bits(found[:, :4]), bits(clean[:, :4]))
    assert np.isnan(found[:, 4:]).all()


def test_a_score_that_is_no_number_shows() -> None:
    case = _Case((KEYS + 30,), 4, 1, 16)
    case.k[0][7, 0, 3] = np.nan
    assert np.isnan(case.run([(0, KEYS + 29)])).all()
    assert np.isfinite(case.run([(0, 6)])).all()


@pytest.mark.parametrize("block_size", [16, 64])
def test_strips_are_known_of_a_tile_and_of_the_next(block_size: int) -> None:
    """What no key is seen of stands for its neighbour, so a prefetch of it asks for nothing new."""
    k = np.zeros((200, 2, 64, block_size), np.uint16)
    v = np.zeros((200, 2, block_size, 64), np.uint16)
    tables = np.random.default_rng(0).permutation(200)[: 1024 // block_size].astype(np.int32)[None]
    starts, kv_head, position, window = np.full(_num_starts(64), -1), 1, KEYS + 40, 500

    for at, tile in ((0, 0), (NEXT, 1)):
        _find_strips(starts, at, tile, position, window, tables, k, v, kv_head)
    keys = np.clip(
        np.arange(0, 2 * KEYS, 16), (position - window + 1) // 16 * 16, position // 16 * 16
    )
    pages, within = tables[0, keys // block_size] * 2 + kv_head, keys % block_size
    assert starts[: 2 * NEXT].tolist() == (pages * 64 * block_size + within).tolist()
    assert starts[2 * NEXT : 4 * NEXT].tolist() == ((pages * block_size + within) * 64).tolist()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("heads", "vectors"), [(8, 2), (4, 1), (1, 4)])
def test_a_tile_asks_for_its_values_and_for_the_keys_of_the_next(
    heads: int, vectors: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element once, by the loops themselves: what they compute is left out."""
    head_dim, num_kv_heads, kv_head = 64, 2, 1
    num_blocks = 2 * KEYS // block_size
    k = np.zeros((num_blocks, num_kv_heads, head_dim, block_size), np.uint16)
    v = np.zeros((num_blocks, num_kv_heads, block_size, head_dim), np.uint16)
    tables = np.random.default_rng(2).permutation(num_blocks).astype(np.int32)[None]
    starts = np.zeros(_num_starts(head_dim), np.int64)
    for at, next_tile in ((0, 0), (NEXT, 1)):
        _find_strips(starts, at, next_tile, 2 * KEYS - 1, 0, tables, k, v, kv_head)
    asked = {id(k): np.zeros(k.size, int), id(v): np.zeros(v.size, int)}

    def prefetch(cache: Array, index: int, count: int) -> None:
        asked[id(cache)][index : index + count] += 1

    idle = ("splat_each", "key_scales", "load_keys", "load_values", "fma_outer", "store_outer")
    for name in (*idle, "_soften"):
        monkeypatch.setattr(attention_tile_cpu, name, lambda *given: None)
    for name in ("inline", "always_inline"):
        monkeypatch.setattr(attention_tile_cpu, name, lambda function: function)
    monkeypatch.setattr(attention_tile_cpu, "num_columns", lambda array, num_rows: num_rows)
    monkeypatch.setattr(attention_tile_cpu, "get", lambda array, index: int(array[index]))
    monkeypatch.setattr(attention_tile_cpu, "prefetch", prefetch)
    attention_tile_cpu._form(heads, vectors)(
        None, 0, k, v, starts, 0, KEYS, 1.0, 0.0, None, 0, None, 0, head_dim
    )
    here, there = tables[0].reshape(2, -1)
    wanted_k, wanted_v = np.zeros(k.shape, int), np.zeros(v.shape, int)
    wanted_v[here, kv_head], wanted_k[there, kv_head] = 1, 1
    np.testing.assert_array_equal(asked[id(k)].reshape(k.shape), wanted_k)
    np.testing.assert_array_equal(asked[id(v)].reshape(v.shape), wanted_v)


@pytest.mark.parametrize(("block_size", "dtype"), [(16, "u2"), (64, "u2"), (16, "f4")])
def test_keys_of_a_tile_are_loaded_by_every_line(
    block_size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of strips that a token sees, and no others: some may lie outside of the cache."""
    k = np.zeros((2 * KEYS // block_size, 2, 64, block_size), dtype)
    v = np.zeros((2 * KEYS // block_size, 2, block_size, 64), dtype)
    tables = np.random.default_rng(4).permutation(len(k)).astype(np.int32)[None]
    starts, low, high = np.zeros(_num_starts(64), np.int64), 33, 224
    _find_strips(starts, 0, 0, high - 1, high - low, tables, k, v, 1)
    per_line = 64 // k.itemsize
    loaded: list[int] = []

    def fetch(cache: Array, index: int, count: int) -> None:
        loaded.extend(range(index // per_line, (index + count - 1) // per_line + 1))

    monkeypatch.setattr(attention_tile_cpu, "get", lambda array, index: int(array[index]))
    monkeypatch.setattr(attention_tile_cpu, "fetch", fetch)
    fetch_keys: Any = attention_tile_cpu.fetch_keys
    fetch_keys.py_func(starts, low, high, k)
    wanted = np.zeros(k.shape, bool)
    for key in range(32, 224):
        wanted[tables[0, key // block_size], 1, :, key % block_size] = True
    lines = np.flatnonzero(wanted.reshape(-1, per_line).any(1)).tolist()
    assert sorted(set(loaded)) == lines
    # Where a block has two strips in a line, it is loaded for each.
    assert len(loaded) == len(lines) * (2 if block_size > per_line else 1)


def test_keys_are_loaded_that_no_tile_before_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a thread's first item, also where it goes on with another's, and those behind a
    tile that was not whole, or behind a part that its token has no tile for."""
    loaded: list[tuple[int, int]] = []
    python = ("_num_tiles", "_num_parts", "_place", "_pair", "_spread_load", "_attend")
    compiled = (
        "_transpose",
        "find_columns",
        "take_next",
        "find_strips",
        "tile",
        "_fold",
        "_finish",
    )
    for name in compiled:
        monkeypatch.setattr(attention_cpu, name, lambda *given: None)
    for name in (*python, "num_starts", "first_key", "visible_keys"):
        monkeypatch.setattr(attention_cpu, name, getattr(attention_cpu, name).py_func)
    # `visible_keys` finds it in its own file.
    monkeypatch.setattr(attention_tile_cpu, "first_key", vars(attention_cpu)["first_key"])
    monkeypatch.setattr(attention_cpu, "get", lambda array, index: int(array[index]))
    monkeypatch.setattr(attention_cpu, "num_columns", lambda array, num_rows: num_rows)
    monkeypatch.setattr(
        attention_cpu, "fetch_keys", lambda _, low, high, __: loaded.append((low, high))
    )

    def run(
        positions: list[int], items: list[int], window: int = 0, num_kv_heads: int = 1,
        num_parts: int = 0,
    ) -> list[tuple[int, int]]:  # fmt: skip
        monkeypatch.setattr(attention_cpu, "prange", lambda count: items)
        loaded.clear()
        k = np.zeros((8, num_kv_heads, 64, 512), np.float32)
        v = np.zeros((8, num_kv_heads, 512, 64), np.float32)
        counts, rows = np.array([len(positions), 1]), np.arange(len(positions))
        tables = np.zeros((len(positions), 8), np.int32)
        q = np.zeros((len(positions), 64 * num_kv_heads), np.float32)
        attention_cpu.attention._function(
            q, counts, np.array(positions), rows, tables, k, v, q, None, None, None, None, None,
            np.zeros(80 * num_parts), num_kv_heads, 64, 1, 64, 80, 1.0, window, 0.0,
        )  # fmt: skip
        return list(loaded)

    long = 2 * KEYS + 9
    assert run([long, long], [0]) == [(0, KEYS)]
    assert run([long, long], [0, 1]) == [(0, KEYS), (0, KEYS)]  # behind a tile of ten
    assert run([2 * KEYS - 1] * 3, [0, 1]) == [(0, KEYS)]
    assert run([2 * KEYS - 1] * 3, [0, 2]) == [(0, KEYS), (0, KEYS)]
    assert run([7, 5], [0, 1]) == [(0, 8), (0, 6)]
    # Of a tile that a window cuts, four keys are seen.
    assert run([2 * KEYS - 1], [0], window=KEYS + 4) == [(KEYS - 4, KEYS), (0, KEYS)]
    # Four parts of each token's tiles, of which the second has one: 2 tokens and 3 KV heads.
    parts = run([4 * KEYS - 1, KEYS - 1], [*range(24)], num_kv_heads=3, num_parts=24)
    assert parts == 3 * [(0, KEYS)]
