"""Prompts that are saved to a file: read back to the bit, refused where the file is not that."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import UsageError
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.page_bytes import SavedPrompt, load_prompt, save_prompt

PRINT = bytes(range(32))
SIZE = 4
BLOCKS = tuple(np.arange(24, dtype=np.uint8).reshape(2, 12))
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file.read().split()\n"


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def saved(folder: Path) -> Path:
    path = folder / "a"
    num_bytes = save_prompt(path, PRINT, SavedPrompt(tuple(range(9)), BLOCKS))
    assert num_bytes == path.stat().st_size
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found, num_bytes = load_prompt(path, PRINT, 12)
    assert num_bytes == path.stat().st_size
    assert found.token_ids == tuple(range(9))
    assert np.array_equal(found.blocks, BLOCKS)
    save_prompt(path, PRINT, SavedPrompt((1, 2), ()))
    assert load_prompt(path, PRINT, 12)[0] == SavedPrompt((1, 2), ()), "no block was kept"


def test_any_bit_that_is_changed_and_any_cut_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at])
        with pytest.raises(UsageError, match=r"a is damaged|of this version|another model"):
            load_prompt(path, PRINT, 12)
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(UsageError, match=r"a is damaged|of this version|another model"):
            load_prompt(path, PRINT, 12)
    path.write_bytes(data + b"\0")
    with pytest.raises(UsageError, match="damaged"):
        load_prompt(path, PRINT, 12)


def test_another_model_is_told(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for fingerprint, block_bytes in ((bytes(32), 12), (PRINT, 8)):
        with pytest.raises(UsageError, match="a was saved with another model, or other settings"):
            load_prompt(path, fingerprint, block_bytes)
    with pytest.raises(UsageError, match="b cannot be read: No such file"):
        load_prompt(tmp_path / "b", PRINT, 12)
    with pytest.raises(UsageError, match="a cannot be written: No such file"):
        save_prompt(tmp_path / "nowhere" / "a", PRINT, SavedPrompt((), ()))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UsageError, match="link cannot be read"):
        load_prompt(tmp_path / "link", PRINT, 12)


def brought_back(cache: KVCache, numbers: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """How many are kept then, and which block was filled with which."""
    filled: list[tuple[int, int]] = []
    num_kept = cache.bring_back(
        [digest(number) for number in numbers], lambda *where: filled.append(where)
    )
    cache.check_integrity()
    return num_kept, filled


def test_what_is_brought_back_is_found_and_takes_the_room_of_what_nobody_reads() -> None:
    cache = KVCache(4, SIZE)
    cache.append(1, 2 * SIZE)
    cache.keep(1, [digest(1), digest(2)])
    num_kept, filled = brought_back(cache, [1, 2, 3, 4, 5])
    assert (num_kept, [number for _, number in filled]) == (4, [2, 3]), "there are four blocks"
    cache.remove(1)
    num_kept, filled = brought_back(cache, [11, 12, 13])
    assert (num_kept, [number for _, number in filled]) == (3, [0, 1, 2])
    assert len(cache.find([digest(n) for n in (11, 12, 13)])) == 3


def test_what_is_erased_is_not_found_but_stays_for_who_reads_it() -> None:
    cache = KVCache(4, SIZE)
    cache.append(1, 2 * SIZE)
    cache.keep(1, [digest(1), digest(2)])
    assert cache.erase([digest(1), digest(2)]) == 0
    cache.remove(1)
    assert cache.erase([digest(2), digest(9)]) == 1
    cache.check_integrity()
    assert len(cache.find([digest(1), digest(2)])) == 1
    assert cache.num_free_blocks == 4


def answered(llm: LLM, salt: str = "") -> tuple[tuple[int, ...], int, Any]:
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3)
    request = llm.engine.request(llm.encode(TEXT), params, RequestTerms(cache_salt=salt))
    llm.engine.complete([request])
    done = llm.engine.result(request)
    return done.token_ids, done.timings.num_cached_tokens, done.logprobs


def test_a_later_program_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with LLM(device="cpu", context_length=256) as llm:
        ids, num_found, logprobs = answered(llm)
        assert num_found == 0
        whole = [*llm.encode(TEXT), *ids]
        num_saved, num_bytes = llm.engine.save_prompt(path, whole, "")
        assert 32 <= num_saved <= len(whole)
        assert num_bytes == path.stat().st_size
        assert llm.engine.erase_prompt(whole, "") == num_saved
        assert answered(llm)[1] == 0
    with LLM(device="cpu", context_length=256) as llm:
        assert llm.engine.restore_prompt(path, "") == (tuple(whole), num_saved, num_bytes)
        again, num_found, told = answered(llm)
        assert num_found == (len(llm.encode(TEXT)) - 1) // 16 * 16 > 0
        assert (again, told) == (ids, logprobs)
        assert answered(llm, "another client")[1] == 0
        llm.engine.check_integrity()

    with (
        LLM(device="cpu", context_length=256, kv_dtype="f32") as llm,
        pytest.raises(UsageError, match="another model, or other settings"),
    ):
        llm.engine.restore_prompt(path, "")
