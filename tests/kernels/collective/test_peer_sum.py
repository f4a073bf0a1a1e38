"""The sum of two GPUs by launches: one is simulated here, and a thread does what the other does."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import LaunchRejected, OutOfMemory
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.launch import Launch, run
from hypocenter.device.peers import Lane, StopWord
from hypocenter.kernels.collective import peer_sum as module
from hypocenter.kernels.collective.peer_sum import BY_PACKETS, LANES, PeerSum

GPU = "sim:h200"
#: Two programs with an end inside of the second; and more than packets are used for.
FEW, MANY = (1, 700), (129, 4096)


def here(tensor: Tensor) -> Array:
    """The bytes of a simulated GPU as they lie in this process, whatever it is doing."""
    kinds = {DType.F32: np.float32, DType.I32: np.int32, DType.I64: np.int64}
    simulated: Any = devices.backend_of(GPU)
    start = tensor.address - simulated._memory.base
    raw = simulated._memory._bytes[start : start + tensor.extent_bytes]
    return np.asarray(raw.view(kinds[tensor.dtype]).reshape(tensor.shape))


@pytest.fixture
def peer_sum(monkeypatch: pytest.MonkeyPatch) -> PeerSum:
    devices.open_device(GPU)
    monkeypatch.setattr(module, "_LOOKS", 16)  # a look takes longer here

    def tensor(name: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        return memory.allocate(name, "test", dtype, shape, device=GPU)

    lanes = {
        name: Lane(*(tensor(f"{name} {at}", kind.dtype, kind.shape) for at in ("here", "there")))
        for name, kind in LANES.items()
    }
    stop = tensor("stop", DType.I32, (1,))
    return PeerSum.on(GPU, lanes, StopWord(stop, here(stop).data.cast("B")))


class Other:
    """What the other GPU sends and has been sent, by turns."""

    def __init__(self, peer_sum: PeerSum) -> None:
        self._sum = peer_sum

    def send(self, values: Array, turn: int) -> None:
        flat = values.reshape(-1)
        if flat.size == np.prod(FEW):
            packets = np.int64(turn) << np.int64(32) | flat.view(np.uint32).astype(np.int64)
            here(self._sum.packets.here)[turn % 2, : flat.size] = packets
            return
        here(self._sum.values.here)[turn % 2, : flat.size] = flat
        here(self._sum.flags.here)[turn % 2, : -(-flat.size // 4096)] = turn

    def was_sent(self, num_values: int, turn: int) -> Array:
        if num_values == np.prod(FEW):
            packets = here(self._sum.packets.there)[turn % 2, :num_values]
            assert set(packets >> 32) == {turn}
            return packets.astype(np.uint32).view(np.float32)
        flags = here(self._sum.flags.there)[turn % 2]
        assert set(flags[: -(-num_values // 4096)]) == {turn}
        return here(self._sum.values.there)[turn % 2, :num_values]


def launch_of(peer_sum: PeerSum, values: Array) -> tuple[Tensor, Launch]:
    x = memory.allocate("x", "test", DType.F32, values.shape, device=GPU)
    copies.to_device(x, values)
    launch = peer_sum.launch(x)
    assert launch is not None
    return x, launch


def drawn(shape: tuple[int, int], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["packets", "chunks"])
def test_each_turn_adds_what_the_other_sent_for_it(
    shape: tuple[int, int], peer_sum: PeerSum
) -> None:
    other, num_values = Other(peer_sum), int(np.prod(shape))
    for turn in (1, 2, 3):
        own, theirs = drawn(shape, turn), drawn(shape, 10 + turn)
        other.send(theirs, turn)
        x, launch = launch_of(peer_sum, own)
        run([launch])
        assert np.array_equal(copies.to_host(x), own + theirs)
        assert np.array_equal(other.was_sent(num_values, turn), own.reshape(-1))


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["packets", "chunks"])
def test_it_waits_for_all_that_the_other_sends(shape: tuple[int, int], peer_sum: PeerSum) -> None:
    """What lies there of an earlier turn is not taken for this one's."""
    other = Other(peer_sum)
    stale, theirs, own = drawn(shape, 1), drawn(shape, 2), drawn(shape, 3)
    for turn in (1, 2):
        other.send(stale, turn)
        run([launch_of(peer_sum, own)[1]])
    devices.synchronise(GPU)
    x, launch = launch_of(peer_sum, own)
    late = threading.Timer(0.5, other.send, (theirs, 3))
    late.start()
    run([launch])
    assert np.array_equal(copies.to_host(x), own + theirs)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["packets", "chunks"])
def test_nobody_waits_for_a_process_that_has_ended(
    shape: tuple[int, int], peer_sum: PeerSum
) -> None:
    _, launch = launch_of(peer_sum, drawn(shape, 1))
    began = time.perf_counter()
    ended = threading.Timer(0.5, peer_sum.let_go)
    ended.start()
    run([launch])
    devices.synchronise(GPU)
    assert time.perf_counter() - began > 0.4  # it did wait before


def test_what_no_lane_holds_is_left_to_the_library(peer_sum: PeerSum) -> None:
    most = LANES["values"].shape[1]
    x = memory.allocate("x", "test", DType.F32, (1, most + 1), device=GPU)
    assert peer_sum.launch(x) is None


def test_a_launch_is_refused_where_lane_or_turns_are_shorter_than_its_rows(
    peer_sum: PeerSum,
) -> None:
    facts = launch_of(peer_sum, drawn(FEW, 1))[1].facts
    short = {
        name: memory.allocate(name, "test", DType.I64, (2, 64), device=GPU)
        for name in ("here", "there")
    }
    BY_PACKETS.check(**facts)
    with pytest.raises(LaunchRejected, match="must fit into a side of the lane"):
        BY_PACKETS.check(**{**facts, **short})
    one = memory.allocate("turns", "test", DType.I32, (1,), device=GPU)
    with pytest.raises(LaunchRejected, match="all programs must have a turn"):
        BY_PACKETS.check(**{**facts, "turns": one})


class Echo(threading.Thread):
    """The other rank of the first sums: it sends what is right, or not quite."""

    def __init__(self, peer_sum: PeerSum, *, is_off_by: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._sum, self._is_off_by = peer_sum, np.float32(is_off_by)

    def run(self) -> None:
        lanes = self._sum
        few, many = 4096 + 256, module._MOST_PACKETS + 4096
        given = np.arange(many, dtype=np.float32) + self._is_off_by
        for turn in range(1, 5):
            while not (here(lanes.packets.there)[turn % 2, :few] >> 32 == turn).any():
                time.sleep(0.01)
            bits = (given[:few] + np.float32(turn)).view(np.uint32).astype(np.int64)
            here(lanes.packets.here)[turn % 2, :few] = np.int64(turn) << np.int64(32) | bits
        num_chunks = -(-many // 4096)
        for turn in range(1, 5):
            while not (here(lanes.flags.there)[turn % 2, :num_chunks] == turn).any():
                time.sleep(0.01)
            here(lanes.values.here)[turn % 2, :many] = given + np.float32(turn)
            here(lanes.flags.here)[turn % 2, :num_chunks] = turn


def test_the_first_sums_tell_whether_the_two_reach_each_other(peer_sum: PeerSum) -> None:
    Echo(peer_sum).start()
    assert module._adds_up(peer_sum, 0)


def test_wrong_first_sums_leave_all_to_the_library(peer_sum: PeerSum) -> None:
    Echo(peer_sum, is_off_by=1.0).start()
    assert not module._adds_up(peer_sum, 0)


def test_first_sums_that_took_too_long_are_no_good_even_if_right(
    peer_sum: PeerSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones would wait for nobody."""
    monkeypatch.setattr(module, "_LOOKS", 1 << 16)
    monkeypatch.setattr(module, "_DEADLINE_SECONDS", 0.01)
    Echo(peer_sum).start()
    assert not module._adds_up(peer_sum, 0)


def test_no_thread_is_left_where_the_first_sums_fail(
    peer_sum: PeerSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise OutOfMemory(GPU, 1, 0, 0)

    monkeypatch.setattr(memory, "allocate", refuse)
    before = set(threading.enumerate())
    with pytest.raises(OutOfMemory):
        module._adds_up(peer_sum, 0)
    assert set(threading.enumerate()) <= before
