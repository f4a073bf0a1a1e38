"""Blocks on disk outlive the server: read back to the bit, and never when they are in doubt."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.engine import disk_blocks
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.block_archive import NUM_DOUBTED_STEPS
from hypocenter.engine.disk_blocks import DiskBlocks
from hypocenter.engine.disk_room import DiskRoom
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.page_bytes import PageBytes
from hypocenter.settings.cache_folder import forget_blocks_of

PRINT = bytes(range(32))
SIZE = 4
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file.read().split()\n"


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def pages(seed: int = 0, num_blocks: int = 6) -> list[Any]:
    make = np.random.default_rng(seed)
    keys = make.normal(size=(2, num_blocks, 5, SIZE)).astype(np.float16)
    return [keys.swapaxes(0, 1), make.normal(size=(num_blocks, 2, SIZE, 3))]


def opened(folder: Path, arrays: list[Any], **more: Any) -> DiskBlocks:
    given: dict[str, Any] = {
        "fingerprint": PRINT,
        "max_bytes": 1 << 30,
        "settings": "s" * 16,
        **more,
    }
    return DiskBlocks(folder, PageBytes(arrays), SIZE, **given)


def left(folder: Path, *numbers: int, **more: Any) -> list[Any]:
    """What a process that ended well had in its blocks, of which it kept these numbers."""
    arrays = pages()
    first = opened(folder, arrays, **more)
    for number in numbers:
        first.put(digest(number), number)
    first.close()
    assert first.num_written == len(numbers)
    return arrays


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_the_next_process_reads_the_same_numbers_elsewhere(tmp_path: Path) -> None:
    arrays = left(tmp_path / "c", 1, 2)
    others = pages(seed=1)
    second = opened(tmp_path / "c", others)
    assert digest(1) not in second, "nothing is read before it is asked for"
    second.prefetch([digest(1), digest(2), digest(3)])
    assert [digest(n) in second for n in (1, 2, 3)] == [True, True, False]
    taken = [(block_id, second.take(digest(n))) for block_id, n in ((5, 2), (0, 1))]
    second.fill([(block_id, data) for block_id, data in taken if data is not None])
    assert second.take(digest(2)) is None, "it is given once"
    for ours, theirs in zip(others, arrays, strict=True):
        assert np.array_equal(ours[5], theirs[2])
        assert np.array_equal(ours[0], theirs[1])
        assert not np.array_equal(ours[4], theirs[1])
    assert list(second.made_with(digest(2)).values()) == ["s" * 16]
    second.close()


def test_many_blocks_come_each_into_its_place(tmp_path: Path) -> None:
    """Several threads copy them."""
    arrays, others = (pages(seed, num_blocks=40) for seed in (0, 1))
    first = opened(tmp_path, arrays)
    for number in range(40):
        first.put(digest(number), number)
    first.close()
    second = opened(tmp_path, others)
    second.prefetch([digest(number) for number in range(40)])
    taken = [(39 - number, second.take(digest(number))) for number in range(40)]
    second.fill([(block_id, data) for block_id, data in taken if data is not None])
    second.close()
    assert second.num_read == 40
    for ours, theirs in zip(others, arrays, strict=True):
        assert np.array_equal(ours, theirs[::-1])


def test_blocks_are_copied_of_strided_arrays_and_others_are_refused() -> None:
    arrays = pages()
    each = PageBytes(arrays)
    wanted = np.concatenate([page[3].reshape(-1).view(np.uint8) for page in arrays])
    assert np.array_equal(each.copy_of(3), wanted)
    others = [np.zeros_like(page) for page in arrays]
    PageBytes(others).put(2, wanted)
    for ours, theirs in zip(others, arrays, strict=True):
        assert np.array_equal(ours[2], theirs[3])
        assert not ours[[0, 1, 3, 4, 5]].any()
    for block_id in (-1, 6):
        with pytest.raises(IndexError):
            each.put(block_id, wanted)
    with pytest.raises(AssertionError):
        each.put(0, wanted[:-1])


def test_files_are_the_users_own(tmp_path: Path) -> None:
    left(tmp_path / "deep" / "c", 1)
    for path in (tmp_path / "deep" / "c").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_could_change_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "c").mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match=r"the user's own: others may write to .*chmod go-w"):
        opened(folder, pages())
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="is a link"):
        opened(tmp_path / "link", pages())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="disk cache"):
        opened(tmp_path / "file", pages())


def test_what_the_last_steps_computed_is_not_written_by_a_process_that_dies(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path, pages())
    first.put(digest(1), 1)
    first.note_step()
    first.put(digest(2), 2)
    for _ in range(NUM_DOUBTED_STEPS - 1):
        first.note_step()
    wait_for(lambda: first.num_written == 1)
    assert [path.name.partition(".")[0] for path in files(tmp_path)] == [digest(1).hex()]
    first.note_step()
    wait_for(lambda: first.num_written == 2)
    first.close()


def test_a_block_that_the_cache_gave_up_is_not_written(tmp_path: Path) -> None:
    first = opened(tmp_path, pages())
    first.put(digest(1), 1)
    first.withdraw(digest(1))
    first.close()
    assert files(tmp_path) == []


def cut(data: bytearray) -> bytearray:
    return data[:-1]


def longer(data: bytearray) -> bytearray:
    return data + b"\0"


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def flip(data: bytearray) -> bytearray:
        data[at] ^= 4
        return data

    return flip


@pytest.mark.parametrize(
    "damage",
    [cut, longer, lambda data: bytearray(), flipped(0), flipped(10), flipped(45), flipped(60),
     flipped(70), flipped(-1)],
    ids=["cut", "longer", "empty", "version", "digest", "settings", "size", "check", "data"],
)  # fmt: skip
def test_damage_is_a_miss_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytearray], bytearray]
) -> None:
    left(tmp_path, 1, 2)
    [path] = [path for path in files(tmp_path) if path.name.startswith(digest(1).hex())]
    path.write_bytes(damage(bytearray(path.read_bytes())))
    second = opened(tmp_path, pages(seed=1))
    second.prefetch([digest(1), digest(2)])
    assert digest(1) not in second
    assert digest(2) not in second, "it is of no use without the one before"
    assert not path.exists(), "it is not read again and again"
    second.prefetch([digest(2)])
    assert digest(2) in second
    assert len([r for r in caplog.records if "damaged" in r.message]) <= 1
    second.close()


def test_files_of_others_are_passed_over(tmp_path: Path) -> None:
    left(tmp_path, 1)
    [path] = files(tmp_path)
    for name in ("x.kv", "00.1.kv", f"{'zz' * 32}.1.kv"):
        (path.parent / name).write_bytes(b"x")
    second = opened(tmp_path, pages(seed=1))
    second.prefetch([digest(1)])
    assert digest(1) in second
    second.close()


def test_no_link_is_followed(tmp_path: Path) -> None:
    left(tmp_path / "c", 1)
    [path] = files(tmp_path / "c")
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    second = opened(tmp_path / "c", pages(seed=1))
    second.prefetch([digest(1)])
    assert digest(1) not in second
    second.close()
    assert (tmp_path / "moved").exists()


@pytest.mark.parametrize("other", [{"fingerprint": bytes(32)}, {}])
def test_another_model_or_setting_reads_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    left(tmp_path, 1)
    second = opened(tmp_path, pages(seed=1), **other)
    second.prefetch([digest(1)])
    assert (digest(1) in second) is (not other)
    second.close()


def test_the_folder_stays_within_its_bound_and_the_oldest_goes_first(tmp_path: Path) -> None:
    left(tmp_path, 1)
    [path] = files(tmp_path)
    size = path.stat().st_size
    os.utime(path, (1e9, 1e9))
    left(tmp_path, 2)
    second = opened(tmp_path, pages(), max_bytes=3 * size, fingerprint=bytes(32))
    for number in (3, 4):
        second.put(digest(number), number)
        second.note_step()
    second.close()
    names = {path.name.partition(".")[0] for path in files(tmp_path)}
    assert digest(1).hex() not in names, "whatever model it was of"
    assert digest(4).hex() in names
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size


def test_what_other_processes_write_counts_too(tmp_path: Path) -> None:
    left(tmp_path, 1)
    size = files(tmp_path)[0].stat().st_size
    first = opened(tmp_path, pages(num_blocks=40), max_bytes=32 * size)
    other = opened(tmp_path, pages(num_blocks=40), max_bytes=32 * size, fingerprint=bytes(32))
    for number in range(30):
        for one in (first, other):
            one.put(digest(number), number)
            one.note_step()
        wait_for(lambda: first._waiting.empty() and other._waiting.empty())
        assert len(files(tmp_path)) <= 32
    first.close()
    other.close()


def test_nobody_elses_file_is_touched_to_make_room(tmp_path: Path) -> None:
    left(tmp_path, 1)
    [path] = files(tmp_path)
    (tmp_path / "project").mkdir()
    theirs = [
        tmp_path / "project" / ".env",
        tmp_path / "project" / "notes.kv",
        path.parent / ".hidden",
    ]
    for one in theirs:
        one.write_text("not a block")
    unfinished = path.parent / f".{'0f' * 8}"
    unfinished.write_text("of a process that died")
    second = opened(tmp_path, pages(), max_bytes=path.stat().st_size)
    second.put(digest(2), 2)
    second.close()
    assert second.num_written == 1
    assert all(one.exists() for one in theirs)
    assert not unfinished.exists()
    assert not path.exists()


def test_a_block_beyond_the_bound_leaves_others_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left(tmp_path, 1)
    [path] = files(tmp_path)
    second = opened(tmp_path, pages(), max_bytes=path.stat().st_size - 1)
    for number in (2, 3):
        second.put(digest(number), number)
    second.close()
    assert files(tmp_path) == [path]
    [line] = [r.message for r in caplog.records]
    assert line.endswith("and a block is one of 368: none is written")


def test_a_process_that_was_stopped_within_a_write_stops_no_other(tmp_path: Path) -> None:
    left(tmp_path, 1)
    with DiskRoom(tmp_path, 1 << 20).reserve(1):
        second = opened(tmp_path, pages())
        second.put(digest(2), 2)
        second.prefetch([digest(1)])
        assert digest(1) in second
        second.close(0.05)
        assert second.num_written == 0
    wait_for(lambda: second.num_written == 1)


def test_a_file_system_without_locks_costs_no_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    room, before = DiskRoom(tmp_path, 1 << 20), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="No locks available"), room.reserve(1):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_read_counts_as_used(tmp_path: Path) -> None:
    left(tmp_path, 1)
    [path] = files(tmp_path)
    os.utime(path, (1e9, 1e9))
    second = opened(tmp_path, pages(seed=1))
    second.prefetch([digest(1)])
    second.close()
    assert path.stat().st_mtime > 1.5e9


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    first = opened(tmp_path, pages())
    for number in range(4):
        first.put(digest(number), number)
    first.close()
    assert [r.message for r in caplog.records if "not written" in r.message] == [
        f"blocks are not written to {tmp_path} for now: the disk is full"
    ]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["kv-room"]


def test_nothing_is_read_where_computing_is_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hypocenter.engine")
    left(tmp_path, 1, 2, 3)
    second = opened(tmp_path, pages(seed=1))
    second.prefetch([digest(1)])
    assert digest(1) in second, "the first one tells how fast the disk is"
    second.note_computed(1000, 1e-9)
    second.prefetch([digest(2), digest(3)])
    assert digest(2) not in second
    [line] = [r.message for r in caplog.records if r.message.startswith("blocks are")]
    assert line.startswith("blocks are computed, and not read from disk: ")
    for _ in range(disk_blocks._TRIES):
        second.prefetch([digest(2), digest(3)])
    assert digest(2) in second, "now and then one is, to see whether that has changed"
    assert digest(3) not in second
    for _ in range(200):
        second.note_computed(1, 10.0)
    second.prefetch([digest(3)])
    assert digest(3) in second
    second.close()


def test_what_a_process_in_doubt_wrote_is_removed(tmp_path: Path) -> None:
    left(tmp_path, 1)
    [path] = files(tmp_path)
    other = path.with_name(f"{digest(2).hex()}.{os.getpid() + 1}.kv")
    other.write_bytes(path.read_bytes())
    forget_blocks_of(tmp_path, os.getpid())
    assert files(tmp_path) == [other]
    forget_blocks_of(tmp_path / "nowhere", 1)


def cache_of(disk: DiskBlocks, num_blocks: int = 6) -> KVCache:
    cache = KVCache(num_blocks, SIZE)
    cache.disk = disk
    return cache


def keep(cache: KVCache, request_id: int, numbers: list[int]) -> list[bytes]:
    digests = [digest(number) for number in numbers]
    cache.append(request_id, len(numbers) * SIZE)
    cache.keep(request_id, digests)
    return digests


def test_a_full_cache_makes_room_for_what_lies_on_disk(tmp_path: Path) -> None:
    first = cache_of(opened(tmp_path, pages()))
    digests = keep(first, 1, [1, 2])
    first.end_step()
    first.remove(1)
    assert first.disk is not None
    first.disk.close()
    second = cache_of(opened(tmp_path, pages(seed=1)))
    keep(second, 1, [11, 12, 13, 14])
    keep(second, 2, [21, 22])
    second.remove(1)
    second.prefetch(digests)
    assert len(second.find(digests)) == 2, "in the place of what nobody reads"
    second.check_integrity()
    assert len(second.find_kept([digest(21), digest(22)])) == 2, "which is read"
    second.prefetch([digest(1)])
    assert second.disk is not None
    second.disk.close()


def test_what_finds_no_room_stays_at_hand(tmp_path: Path) -> None:
    first = cache_of(opened(tmp_path, pages()))
    digests = keep(first, 1, [1, 2])
    first.end_step()
    assert first.disk is not None
    first.disk.close()
    second = cache_of(opened(tmp_path, pages(seed=1)))
    keep(second, 1, [11, 12, 13, 14, 15, 16])
    second.prefetch(digests)
    assert second.find(digests) == [], "all blocks are in use"
    second.check_integrity()
    second.remove(1)
    assert second.disk is not None
    assert digest(1) in second.disk
    assert len(second.find(digests)) == 2
    second.disk.close()


def test_a_request_that_failed_leaves_nothing(tmp_path: Path) -> None:
    cache = cache_of(opened(tmp_path, pages()))
    keep(cache, 1, [1, 2])
    for _ in range(NUM_DOUBTED_STEPS + 1):
        cache.end_step()
    wait_for(lambda: len(files(tmp_path)) == 2)
    keep(cache, 2, [3])
    cache.remove(2, forget=True)
    cache.remove(1, forget=True)
    assert cache.disk is not None
    cache.disk.close()
    assert files(tmp_path) == []


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def answered(llm: LLM, salt: str = "") -> tuple[tuple[int, ...], Any, int]:
    """Tokens of an answer with their logprobs, and how many tokens of the prompt were found."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3)
    request = llm.engine.request(llm.encode(TEXT * 2), params, RequestTerms(cache_salt=salt))
    llm.engine.complete([request])
    done = llm.engine.result(request)
    return done.token_ids, done.logprobs, done.timings.num_cached_tokens


def test_a_later_program_gives_the_same_bits(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"device": "cpu", "context_length": 256, "disk_cache": str(tmp_path)}
    with LLM(**fields) as llm:
        *expected, num_found = answered(llm)
        assert num_found == 0
    with LLM(**fields) as llm:
        *again, num_found = answered(llm)
        assert num_found == (len(llm.encode(TEXT * 2)) - 1) // 16 * 16 >= 32
        assert again == expected
        assert answered(llm, salt="another client")[-1] == 0
        llm.engine.check_integrity()
    with LLM(**{**fields, "kv_dtype": "f32"}) as llm:
        assert answered(llm)[-1] == 0


def test_on_a_gpu_it_is_refused() -> None:
    with (
        pytest.raises(BadSetting, match=r"disk_cache is .*blocks of the CPU alone"),
        LLM(device="sim:mi300x", context_length=64, disk_cache="/tmp/none"),
    ):
        pass
