"""Settled blocks outlive their process: read back to the bit, and not when they are in doubt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ops.kernel_launch import bits

from hypocenter import LLM, SamplingParams
from hypocenter.device.backend import Room
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.block_archive import NUM_DOUBTED_STEPS, BlockArchive
from hypocenter.engine.kv_cache import KVCache
from hypocenter.model.tensors import footprint

PRINT = bytes(range(32))
SIZE = 4
TEXT = (
    "def read_lines(path):\n    with open(path) as file:\n        return file.read().splitlines()"
)


@pytest.fixture
def path() -> Iterator[str]:
    file = os.memfd_create("blocks")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def pages(seed: int = 0, num_blocks: int = 6) -> list[Any]:
    """Two layers; the second axis is the outermost in memory, as that of the CPU's pages is."""
    make = np.random.default_rng(seed)
    keys = [make.normal(size=(2, num_blocks, 5, SIZE)).astype(np.float16) for _ in range(2)]
    return [*(key.swapaxes(0, 1) for key in keys), make.normal(size=(num_blocks, 2, SIZE, 3))]


def archive(
    path: str, arrays: list[Any], fingerprint: bytes = PRINT, slots: int = 4
) -> BlockArchive:
    block_bytes = sum(array[0].nbytes for array in arrays)
    return BlockArchive(path, arrays, fingerprint, slots * block_bytes)


def left(path: str, numbers: Iterator[int] | list[int], num_steps: int = NUM_DOUBTED_STEPS) -> Any:
    """What a process had in its blocks that put each of `numbers`, and ran on for some steps."""
    arrays = pages()
    first = archive(path, arrays)
    for number in numbers:
        first.put(digest(number), number)
    for _ in range(num_steps):
        first.note_step()
    return arrays


def test_the_next_process_reads_the_same_numbers_elsewhere(path: str) -> None:
    before, now = left(path, [1, 3]), pages(seed=1)
    second = archive(path, now, slots=2)  # the number of slots is the file's
    assert len(second) == 2
    assert second.fetch(digest(3), 5)
    assert [bits(array[5]).tolist() for array in now] == [bits(a[3]).tolist() for a in before]
    others = pages(seed=1)
    assert all(np.array_equal(a[:5], b[:5]) for a, b in zip(now, others, strict=True))


def test_what_the_last_steps_left_is_in_doubt(path: str) -> None:
    arrays = pages()
    first = archive(path, arrays)
    for number in range(4):
        first.put(digest(number), number)
        first.note_step()
    second = archive(path, arrays)
    assert [digest(number) in second for number in range(4)] == [True, False, False, False]
    assert [digest(number) in first for number in range(4)] == [True] * 4


def damaged_data(file: Any) -> None:
    file[-1] ^= 1


def damaged_entry(file: Any) -> None:
    where = file.tobytes().index(digest(1))
    file[where + 32] ^= 1  # the step


@pytest.mark.parametrize("damage", [damaged_data, damaged_entry])
def test_a_block_that_was_written_over_is_not_read(
    path: str, damage: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    left(path, [2, 4, 5, 1], num_steps=9)
    damage(np.memmap(path, np.uint8, "r+"))
    second = archive(path, pages())
    assert not second.fetch(digest(1), 0)
    assert digest(1) not in second
    assert "damaged" in caplog.text
    assert second.fetch(digest(2), 0)


def test_a_block_that_was_being_copied_is_not_there(path: str) -> None:
    arrays = pages()
    first = archive(path, arrays)
    first.put(digest(1), 1)
    first._entries["is_full"][:] = 0  # what `put` begins with
    first.forget(digest(7))
    for _ in range(9):
        first.note_step()
    assert len(archive(path, arrays)) == 0


@pytest.mark.parametrize("other", ["fingerprint", "size", "magic", "cut"])
def test_what_was_left_by_something_else_is_not_read(path: str, other: str) -> None:
    left(path, [1])
    arrays, fingerprint = pages(), PRINT
    if other == "fingerprint":
        fingerprint = bytes(32)
    elif other == "size":
        arrays = arrays[:2]
    elif other == "magic":
        np.memmap(path, np.uint8, "r+")[0] ^= 1
    else:
        os.truncate(path, 40)
    second = archive(path, arrays, fingerprint)
    assert len(second) == 0
    second.put(digest(1), 1)
    assert second.fetch(digest(1), 2)


def test_the_first_to_be_put_goes_first(path: str) -> None:
    arrays = pages()
    one = archive(path, arrays, slots=2)
    for number in (1, 2, 3):
        one.put(digest(number), number)
        one.note_step()
    one.put(digest(3), 0)  # is there already
    assert [digest(number) in one for number in (1, 2, 3)] == [False, True, True]
    for _ in range(9):
        one.note_step()
    second = archive(path, arrays)
    second.put(digest(4), 4)
    assert [digest(number) in second for number in (2, 3, 4)] == [False, True, True]


def test_memory_without_room_for_a_block_is_refused(path: str) -> None:
    with pytest.raises(OSError, match="no room for a block"):
        archive(path, pages(), slots=0)
    with pytest.raises(FileNotFoundError):
        archive("/nowhere/blocks", pages())


# -- the cache ------------------------------------------------------------------------------------


def keep(cache: KVCache, request_id: int, num_blocks: int) -> list[bytes]:
    """Have a request compute so many blocks, and keep them."""
    digests = [digest(number) for number in range(num_blocks)]
    cache.append(request_id, num_blocks * SIZE)
    cache.keep(request_id, digests)
    for _ in range(9):
        cache.end_step()
    return digests


def test_a_new_cache_finds_what_the_old_one_kept(path: str) -> None:
    old = KVCache(6, SIZE, archive=archive(path, pages()))
    digests = keep(old, 1, 3)
    new = KVCache(6, SIZE, archive=archive(path, pages()))
    found = new.find(digests)
    assert len(found) == 3
    new.check_integrity()
    assert (new.num_free_blocks, new.num_kept_blocks) == (6, 3)
    assert new.adopt(2, found) == 3 * SIZE
    new.check_integrity()
    assert new.num_free_blocks == 3


def test_no_block_is_given_up_for_one_that_can_be_computed(path: str) -> None:
    old = KVCache(6, SIZE, archive=archive(path, pages()))
    digests = keep(old, 1, 3)
    new = KVCache(6, SIZE, archive=archive(path, pages()))
    new.append(9, 5 * SIZE)
    assert len(new.find(digests)) == 1
    new.check_integrity()


def test_what_a_failed_request_computed_is_not_left(path: str) -> None:
    old = KVCache(6, SIZE, archive=archive(path, pages()))
    digests = keep(old, 1, 3)
    old.remove(1, forget=True)
    assert old.find(digests) == []
    assert KVCache(6, SIZE, archive=archive(path, pages())).find(digests) == []


# -- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0", "q4_0", "q4_0_hadamard"])
@pytest.mark.tier("sim", fast=lambda case: case.kv_dtype in ("f16", "q8_0"))
def test_a_new_process_goes_on_with_the_same_logits(path: str, kv_dtype: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3)
    with LLM(context_length=256, kv_dtype=kv_dtype) as alone:
        whole = alone.generate(TEXT, params)
    with LLM(context_length=256, kv_dtype=kv_dtype, block_memory=path) as first:
        begun = first.generate(TEXT, params)
        size = first.engine.runner.block_size
    assert (begun.token_ids, begun.logprobs) == (whole.token_ids, whole.logprobs)
    with LLM(context_length=256, kv_dtype=kv_dtype, block_memory=path) as second:
        prompt_ids = second.encode(TEXT)
        request = second.engine.request(
            prompt_ids, params, RequestTerms(output_ids=whole.token_ids[:30])
        )
        second.engine.complete([request])
    assert second.engine.result(request).token_ids == whole.token_ids
    assert request.logprobs == list(whole.logprobs or ())[30:]
    # All but the block that grows, and what was settled within the last steps.
    assert request._num_prompt_tokens < 2 * size
    assert 0 < request.num_cached <= len(prompt_ids)


def test_another_model_or_setting_reads_nothing(path: str) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for fields in (
        {"kv_dtype": "f16"},
        {"kv_dtype": "q8_0"},
        {"kv_dtype": "q4_0"},
        {"kv_dtype": "q4_0_hadamard"},  # of as many bytes
        {"kv_dtype": "f16", "num_threads": 1},
    ):
        with LLM(context_length=256, block_memory=path, **fields) as llm:
            assert llm.generate(TEXT, params).timings.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("num_caches", "share"), [(0.5, None), (1.0, None), (2.0, 0.25), (9.0, 1.0)]
)
def test_the_copies_leave_room_for_the_cache_itself(
    path: str, monkeypatch: pytest.MonkeyPatch, num_caches: float, share: float | None
) -> None:
    """Its pages are not touched yet, so that the memory that they will take counts as available."""
    with LLM(context_length=256) as llm:
        runner = llm.engine.runner
        pages = [*runner._pages.keys, *runner._pages.values]
        num_bytes = sum(page.data.nbytes for page in pages)
        room = Room(int(num_caches * num_bytes), 99 * num_bytes)
        monkeypatch.setattr(footprint, "host_room", lambda: room)
        runner.open_archive(path)
        if share is None:
            assert runner.archive is None
        else:
            assert runner.archive is not None
            assert len(runner.archive._entries) == int(share * runner.num_blocks)
