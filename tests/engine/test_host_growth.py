"""A KV cache in host memory that grows as it is written, on a machine whose memory others take."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
from models.tiny_gguf import write_tiny
from pretended.fake_runner import fake_engine, finish
from test_scheduler import add, step

from hypocenter.base.errors import NoHostMemory, OutOfBlocks
from hypocenter.device.backend import Room
from hypocenter.engine.host_growth import HostGrowth, left_bytes
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.scheduler import Scheduler
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import with_host_cache
from hypocenter.model.tensors import footprint
from hypocenter.settings.config import KV_DTYPES, EngineConfig, SamplingParams

BLOCK = 1 << 20
GIB = 1 << 30


class Machine:
    """Its /proc/meminfo, and a clock that moves on with each look."""

    def __init__(self, root: Path, total: int = 2 * GIB) -> None:
        self.root, self.total, self.time, self.num_looks = root, total, 0.0, 0
        (root / "proc").mkdir()
        self.leave(total)

    def leave(self, num_bytes: int) -> None:
        """So much is available, whatever was before."""
        text = f"MemTotal: {self.total >> 10} kB\nMemAvailable: {num_bytes >> 10} kB\n"
        (self.root / "proc/meminfo").write_text(text)

    def leave_blocks(self, number: int) -> None:
        """So many blocks may be written beside what is left to others."""
        self.leave(left_bytes(Room(0, self.total)) + number * BLOCK)

    def look(self) -> Room | None:
        self.num_looks += 1
        return footprint.host_room(self.root)

    def now(self) -> float:
        return self.time

    def growth(self) -> HostGrowth:
        return HostGrowth(BLOCK, self.look, self.now)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def cache_of(machine: Machine, num_blocks: int = 8) -> KVCache:
    cache = KVCache(num_blocks, 4, growth=machine.growth())
    cache.look_at_memory()
    return cache


def test_some_memory_is_left_to_others() -> None:
    assert left_bytes(Room(0, 1 << 28)) == 64 << 20
    assert left_bytes(Room(0, 16 * GIB)) == GIB // 2
    assert left_bytes(Room(0, 1024 * GIB)) == GIB


def test_blocks_that_were_never_written_are_had_while_there_is_memory(machine: Machine) -> None:
    machine.leave_blocks(3)
    cache = cache_of(machine)
    assert (cache.num_free_blocks, cache.num_reachable_blocks) == (3, 3)
    cache.append(1, 3 * 4)
    cache.check_integrity()
    assert cache.num_free_blocks == 0
    with pytest.raises(NoHostMemory, match="1 blocks needed, but 0 can be had") as caught:
        cache.append(1, 1)
    assert (
        "the KV cache grows no further: 67.00 MiB of memory are available, of which 64.00 MiB"
        in (str(caught.value))
    )
    assert isinstance(caught.value, OutOfBlocks)
    cache.remove(1)
    assert cache.num_free_blocks == 3, "these have their memory"
    cache.append(2, 3 * 4)
    cache.check_integrity()


def test_memory_that_others_take_is_not_grown_into(machine: Machine) -> None:
    cache = cache_of(machine)
    cache.append(1, 2 * 4)
    machine.leave(0)
    machine.time += 0.1
    cache.look_at_memory()
    assert (machine.num_looks, cache.num_free_blocks) == (1, 6), "it is looked at now and then"
    machine.time += 0.2
    cache.look_at_memory()
    assert (machine.num_looks, cache.num_free_blocks) == (2, 0)
    cache.remove(1)
    assert (cache.num_free_blocks, cache.num_reachable_blocks) == (2, 2)
    machine.leave(machine.total)
    machine.time += 1.0
    cache.look_at_memory()
    assert cache.num_free_blocks == 8


def test_kept_blocks_give_way_before_memory_is_taken_that_is_not_there(machine: Machine) -> None:
    machine.leave_blocks(2)
    cache = cache_of(machine)
    cache.append(1, 2 * 4)
    cache.keep(1, [b"a" * 32, b"b" * 32])
    cache.remove(1)
    cache.append(2, 4)
    assert cache.blocks(2) == (1,)
    assert cache.find_kept([b"a" * 32, b"b" * 32]) == [0]
    cache.check_integrity()


class Archive:
    """Has each block that is asked for."""

    def __contains__(self, digest: bytes) -> bool:
        return True

    def fetch(self, digest: bytes, block_id: int) -> bool:
        return True

    def made_with(self, digest: bytes) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("from_archive", [False, True])
def test_blocks_of_another_process_take_no_more_memory_than_there_is(
    from_archive: bool, machine: Machine
) -> None:
    """What is copied into a block writes it, as a request would."""
    machine.leave_blocks(2)
    archive = cast(Any, Archive()) if from_archive else None
    cache = KVCache(8, 4, archive=archive, growth=machine.growth())
    cache.look_at_memory()
    digests = [bytes([number]) * 32 for number in range(5)]
    if from_archive:
        found = cache.find_kept(digests)
    else:
        filled: list[int] = []
        assert cache.bring_back(digests, lambda block_id, _: filled.append(block_id)) == 2
        found = filled
    assert found == [0, 1]
    cache.check_integrity()
    machine.time += 1.0
    cache.look_at_memory()  # there is as much again
    assert cache.num_free_blocks == 4, "two that nobody reads, and two that were never written"


def test_without_figures_of_the_system_nothing_is_held_back() -> None:
    cache = KVCache(8, 4, growth=HostGrowth(BLOCK, lambda: None))
    cache.look_at_memory()
    assert cache.num_free_blocks == 8


def scheduler_of(cache: KVCache) -> Scheduler:
    return Scheduler(cache, max_batch_tokens=16, max_batch_requests=4)


def test_a_request_waits_for_memory_that_another_has(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hypocenter.engine")
    machine.leave_blocks(4)
    scheduler = scheduler_of(cache_of(machine))
    first, second = add(scheduler, [9, 9])
    assert step(scheduler) == [(0, 0, 9)]
    assert step(scheduler) == [(0, 9, 10)], "three blocks of four are its own"
    scheduler.finish(first, "stop")
    assert step(scheduler) == [(1, 0, 9)]
    assert second.error is None
    for _ in range(4):
        step(scheduler)
    assert [record.message for record in caplog.records] == [
        "the KV cache grows no further: 68.00 MiB of memory are available, of which 64.00 MiB are "
        "left to other programs"
    ]


def test_one_that_fills_the_memory_alone_ends_with_what_would_help(machine: Machine) -> None:
    machine.leave_blocks(2)
    scheduler = scheduler_of(cache_of(machine))
    (request,) = add(scheduler, [12])
    step(scheduler)
    step(scheduler)
    assert isinstance(request.error, NoHostMemory)
    assert str(request.error).endswith("end other programs, or lower kv_tokens and ask for less")


def test_one_that_could_never_run_is_refused_before_it_waits(machine: Machine) -> None:
    engine = fake_engine(num_blocks=8, block_size=4)
    engine.cache._growth = machine.growth()
    machine.leave_blocks(2)
    with pytest.raises(NoHostMemory, match="3 blocks needed, but 2 can be had"):
        engine.request(list(range(1, 11)), SamplingParams(max_tokens=1))
    request = engine.request([1, 2, 3], SamplingParams(max_tokens=2))
    finish(engine, request)
    assert request.error is None


def test_a_cpus_cache_takes_a_quarter_of_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_gguf(write_tiny(tmp_path / "tiny.gguf")) as file:
        facts = read_architecture(file)
        per_token = facts.kv_bytes_per_token(KV_DTYPES["f16"])

        def tokens(available: int | None, **fields: object) -> int | None:
            room = None if available is None else Room(available, 1 << 40)
            monkeypatch.setattr(footprint, "host_room", lambda: room)
            config = EngineConfig(device="cpu", context_length=32, **fields)  # type: ignore[arg-type]
            return with_host_cache(file, facts, config).kv_tokens

        many = {"max_batch_requests": 64}
        config = EngineConfig(device="cpu", context_length=32, max_batch_requests=64)
        needed = footprint.needed_bytes(file, facts, config, 32)
        others = sum(needed.values()) - needed["KV cache"]
        assert tokens(others + 4 * 512 * per_token, **many) == 512
        assert tokens(others + 4 * 513 * per_token, **many) == 512, "whole blocks, by 16"
        assert tokens(1 << 36, **many) == 64 * 32, "what requests can fill"
        assert tokens(1 << 36, max_batch_requests=1) is None, "one context"
        assert tokens(others + 4 * 512 * per_token, cpu_memory_fraction=0.125, **many) == 256
        assert tokens(others, **many) is None
        assert tokens(None, **many) is None
        assert tokens(1 << 36, kv_tokens=96, **many) == 96
        assert tokens(1 << 36, launch_mode="traced", **many) is None
