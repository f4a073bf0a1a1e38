"""Blocks that the cache keeps are read back after each step of a traced run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hypocenter.base.tensor import DType
from hypocenter.device import memory, page_watch
from hypocenter.device.page_watch import MAX_WATCHED, PageWatch
from hypocenter.engine.kv_cache import KVCache
from hypocenter.model.layers.step_buffers import KVPages

BLOCKS, BLOCK = 40, 4


class Heard:
    """What a recorder is told."""

    current_step = 3

    def __init__(self) -> None:
        self.changes: list[tuple[str, int, int, int]] = []

    def record_block_change(self, page: Any, block: int, request: int, kept_in: int) -> None:
        self.changes.append((page.name, block, request, kept_in))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    made = Heard()
    monkeypatch.setattr(page_watch, "current", lambda: made)
    return made


@pytest.fixture(params=[DType.F16, DType.Q8_0])
def pages(request: pytest.FixtureRequest) -> KVPages:
    def make(name: str) -> Any:
        if request.param is DType.F16:
            tensor = memory.allocate(name, "kv_cache", DType.F16, (BLOCKS, 2, 8, BLOCK))
        else:
            shape = (BLOCKS, 2, 32, BLOCK)
            tensor = memory.allocate_blocks(name, "kv_cache", request.param, shape, along=2)
        tensor.data[...] = np.random.default_rng(1).random(tensor.data.shape)
        return tensor

    return KVPages((make("k_cache.0"), make("k_cache.1")), (make("v_cache.0"), make("v_cache.1")))


def test_a_kept_block_that_is_written_is_told_once(heard: Heard, pages: KVPages) -> None:
    watch = PageWatch((*pages.keys, *pages.values))
    watch.note_kept(5, 7)
    watch.look()
    pages.keys[0].data[4] = 0  # another one
    watch.look()
    assert heard.changes == []
    pages.values[1].data[5, 1, 7, 3] += 1
    watch.look()
    watch.look()
    assert heard.changes == [("v_cache.1", 5, 7, 3)]


def test_what_is_given_out_anew_may_be_written(heard: Heard, pages: KVPages) -> None:
    cache = KVCache(2, BLOCK, PageWatch((*pages.keys, *pages.values)))
    cache.append(1, 2 * BLOCK)
    blocks = cache.blocks(1)
    cache.keep(1, [b"first", b"second"])
    cache.remove(1)
    cache.append(2, BLOCK)  # takes the one that nobody has read for the longest time
    taken = cache.blocks(2)[0]
    for block in blocks:
        pages.keys[0].data[block] += 1
    assert cache._watch is not None
    cache._watch.look()
    [left] = set(blocks) - {taken}
    assert heard.changes == [("k_cache.0", left, 1, 3)]


def test_the_blocks_that_were_kept_last_are_watched(heard: Heard, pages: KVPages) -> None:
    watch = PageWatch((*pages.keys, *pages.values))
    for block in range(MAX_WATCHED + 1):
        watch.note_kept(block, block)
    pages.keys[1].data[:] += 1
    watch.look()
    assert [block for _, block, _, _ in heard.changes] == list(range(1, MAX_WATCHED + 1))
