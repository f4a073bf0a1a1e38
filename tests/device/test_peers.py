"""Memory that two GPUs share, with GPUs that run nothing: what both ranks agree on."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hypocenter.base.errors import NotShareable
from hypocenter.base.tensor import DType
from hypocenter.device import devices
from hypocenter.device.group import SumByLaunches
from hypocenter.device.offline.abstract import AbsentGroup, AbstractGpu
from hypocenter.device.peers import LaneKind, open_lanes, stop_word
from hypocenter.kernels.collective.peer_sum import open_peer_sum
from hypocenter.record import recorder

WANTED = {"values": LaneKind(DType.F32, (2, 64)), "flags": LaneKind(DType.I32, (2, 4))}


class SharingGpu(AbstractGpu):
    """Gives memory a handle that holds its address, and maps it there."""

    def __init__(
        self, vendor: str, *, gives: int = 9, maps: int = 9, has_atomics: bool = True
    ) -> None:
        super().__init__(vendor)
        self.index, self._has_atomics = vendor == "hopper", has_atomics
        self._next += (vendor == "hopper") << 30  # no address of the other
        self._gives, self._maps = gives, maps

    def require_atomics(self, other: int) -> None:
        assert other == 1 - self.index
        if not self._has_atomics:
            raise NotShareable(self.name, "no")

    def allocate_shared(self, num_bytes: int) -> tuple[int, bytes]:
        self._gives -= 1
        if self._gives < 0:
            raise NotShareable(self.name, "no")
        address = self.allocate(num_bytes)
        return address, address.to_bytes(64, "little")

    def map_shared(self, handle: bytes, num_bytes: int) -> int:
        self._maps -= 1
        if self._maps < 0:
            raise NotShareable(self.name, "no")
        return int.from_bytes(handle, "little")

    def map_host(self, host: memoryview) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(host))


class Pair(AbsentGroup):
    """One of two ranks that are threads of this process."""

    meeting = threading.Barrier(2)
    words: dict[int, bytes]

    def __init__(self, rank: int, words: dict[int, bytes]) -> None:
        super().__init__(rank, 2)
        self.words, self.num_swaps, self.tried = words, 0, list[bool]()

    def add_by(self, sums: SumByLaunches | None) -> None:
        self.tried.append(sums is not None)
        self.peer_sum = sums

    def swap(self, data: bytes) -> tuple[bytes, ...]:
        self.num_swaps += 1
        self.words[self.rank] = data
        self.meeting.wait(10)
        told = (self.words[0], self.words[1])
        self.meeting.wait(10)
        return told


def opened(first: SharingGpu, second: SharingGpu) -> list[Any]:
    """The lanes that both ranks get."""
    return both(first, second, lambda group, device: open_lanes(group, device, WANTED))


def both(first: SharingGpu, second: SharingGpu, call: Callable[[Pair, str], Any]) -> list[Any]:
    """What both ranks get, which have met as often as each other."""
    words: dict[int, bytes] = {}
    groups = [Pair(0, words), Pair(1, words)]
    found: list[Any] = ["nothing", "nothing"]

    def run(rank: int, gpu: SharingGpu) -> None:
        found[rank] = call(groups[rank], gpu.name)

    devices.use_backend(first)
    devices.use_backend(second)
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert groups[0].num_swaps == groups[1].num_swaps
    return found


def test_what_lies_there_is_what_the_other_has_here() -> None:
    first, second = opened(SharingGpu("nvidia"), SharingGpu("hopper"))
    assert first is not None
    assert second is not None
    for name, kind in WANTED.items():
        for one, other in ((first, second), (second, first)):
            assert one[name].there.address == other[name].here.address
            assert (one[name].there.dtype, one[name].there.shape) == (kind.dtype, kind.shape)
        assert first[name].here.address != second[name].here.address


@pytest.mark.parametrize(
    "make",
    [
        lambda: SharingGpu("hopper", gives=0),
        lambda: SharingGpu("hopper", gives=1),
        lambda: SharingGpu("hopper", maps=0),
        lambda: SharingGpu("hopper", maps=1),
        lambda: SharingGpu("hopper", has_atomics=False),
    ],
    ids=["gives none", "gives one", "maps none", "maps one", "no atomics"],
)
def test_where_one_cannot_share_neither_does(make: Callable[[], SharingGpu]) -> None:
    assert opened(SharingGpu("nvidia"), make()) == [None, None]
    other = make()
    assert opened(other, SharingGpu("nvidia")) == [None, None]


def test_a_record_says_whose_memory_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, str] = {}

    def note(_: Any, allocation: Any, name: str, owner: str, kind: str = "") -> None:
        kinds[name] = kind

    monkeypatch.setattr(type(recorder.current()), "record_allocation", note)
    opened(SharingGpu("nvidia"), SharingGpu("hopper"))
    stop_word("cuda:hopper")
    assert kinds == {
        **{f"{name} here": "device" for name in WANTED},
        **{f"{name} there": "mapped" for name in WANTED},
        "stop": "pinned",
    }


def sums_of(group: Pair, device: str) -> tuple[list[bool], bool]:
    """What was tried, and whether it stays."""
    open_peer_sum(group, device)
    return group.tried, group.peer_sum is not None


def test_sums_that_do_not_arrive_are_left_to_the_library() -> None:
    """As on GPUs that launch nothing."""
    assert both(SharingGpu("nvidia"), SharingGpu("hopper"), sums_of) == [([True, False], False)] * 2


def test_nothing_is_tried_where_one_has_no_lanes() -> None:
    found = both(SharingGpu("nvidia"), SharingGpu("hopper", maps=1), sums_of)
    assert found == [([], False)] * 2


def test_the_word_of_the_host_is_nothing_until_it_is_set() -> None:
    gpu = SharingGpu("nvidia")
    devices.use_backend(gpu)
    word = stop_word(gpu.name)
    assert word is not None
    seen = ctypes.c_int32.from_address(word.tensor.address)
    assert seen.value == 0
    assert not word.is_set
    word.set()
    assert seen.value == 1
    assert word.is_set


def test_the_page_of_a_word_stays_mapped_as_the_driver_knows_it() -> None:
    gpu = SharingGpu("nvidia")
    devices.use_backend(gpu)
    places = set()
    for _ in range(3):
        word = stop_word(gpu.name)
        assert word is not None
        places.add(word.tensor.address)
        del word
        gc.collect()
    assert len(places) == 3


def test_a_gpu_that_shares_nothing_is_no_failure_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Exception] = []
    monkeypatch.setattr(
        type(recorder.current()), "record_failure", lambda _, error: told.append(error)
    )
    assert opened(SharingGpu("nvidia", gives=1), SharingGpu("hopper", maps=1)) == [None, None]
    assert told == []
