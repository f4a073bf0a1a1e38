"""What is asked of a driver about two GPUs; the driver is a pretended one."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
from pretended.fake_torch import FakeTorch

from hypocenter.base.errors import DeviceFault, NotShareable, OutOfMemory
from hypocenter.device.gpu import torch_gpu
from hypocenter.device.gpu.sharing import SharingDriver
from hypocenter.device.gpu.torch_gpu import TorchGpu
from hypocenter.device.limits import named_gpu


class Libcuda:
    def __init__(self, answer: int, status: int = 0) -> None:
        self.answer, self.status, self.asked = answer, status, (0, 0, 0)

    def cuDeviceGetP2PAttribute(self, value: Any, *asked: ctypes.c_int) -> int:
        attribute, source, destination = (number.value for number in asked)
        self.asked = (attribute, source, destination)
        value._obj.value = self.answer
        return self.status


@pytest.mark.parametrize("answer", [0, 1])
def test_whether_two_gpus_have_atomics_is_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    library = Libcuda(answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert SharingDriver("cuda:1").has_atomics(1, 0) is bool(answer)
    # CUDA driver API: CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED is 3.
    assert library.asked == (3, 1, 0)


def test_a_driver_that_does_not_know_is_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libcuda(1, status=101))
    with pytest.raises(NotShareable, match="cuDeviceGetP2PAttribute gave error 101"):
        SharingDriver("cuda").has_atomics(0, 1)
    with pytest.raises(NotShareable):  # AMD's is not asked
        SharingDriver("hip").has_atomics(0, 1)


class FullCard:
    """A driver whose GPU has no room, or that says another error."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cuMemAlloc_v2(self, address: Any, num_bytes: ctypes.c_size_t) -> int:
        return self.status


def test_a_card_that_is_full_is_told_from_one_that_shares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FullCard(2))
    gpu = TorchGpu("cuda", FakeTorch(), 0, named_gpu("sm_90"), environ={})
    with pytest.raises(OutOfMemory, match=r"1\.00 KiB asked for") as full:
        gpu.allocate_shared(1024)
    assert "\n" not in str(full.value)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FullCard(801))
    with pytest.raises(NotShareable, match="cuMemAlloc_v2 gave error 801"):
        gpu.allocate_shared(1024)


def test_a_card_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver counts it, and then does not open it."""
    fake = FakeTorch()

    def refuse(index: int) -> None:
        raise RuntimeError(
            "CUDA error: no CUDA-capable device is detected\nFor debugging consider passing ..."
        )

    monkeypatch.setattr(fake.cuda, "set_device", refuse)
    monkeypatch.setattr(torch_gpu, "find_gpu", lambda name: (fake, "cuda", 0))
    with pytest.raises(DeviceFault, match="no CUDA-capable device is detected") as gone:
        torch_gpu.open_gpu("cuda")
    assert "\n" not in str(gone.value)
    assert "For debugging" not in str(gone.value)


class Mapping:
    """A driver that maps memory when it is let, and counts how often it was asked."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.num_asked, self.may = status, 0, threading.Event()

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        self.num_asked += 1
        assert self.may.wait(20)
        address._obj.value = 0x7000 + bytes(handle)[0]
        return self.status


def test_memory_of_others_is_mapped_while_something_else_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Mapping()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    gpu = TorchGpu("cuda", FakeTorch(), 0, named_gpu("sm_90"), environ={})
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(gpu, "_foreign", lambda *given: seen.append(given))
    monkeypatch.setattr(gpu, "_know", lambda memory: seen[-1][0])
    gpu.begin_map(bytes([5]) * 64)
    driver.may.set()
    assert gpu.map_shared(bytes([5]) * 64, 100) == 0x7005
    assert (seen, driver.num_asked) == ([(0x7005, 100)], 1)
    assert gpu.map_shared(bytes([6]) * 64, 100) == 0x7006, "one that was not begun"
    assert driver.num_asked == 2


def test_memory_that_cannot_be_mapped_is_told_of_to_who_maps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Mapping(status=201)
    driver.may.set()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    gpu = TorchGpu("cuda", FakeTorch(), 0, named_gpu("sm_90"), environ={})
    gpu.begin_map(bytes(64))
    with pytest.raises(NotShareable, match="cuIpcOpenMemHandle_v2 gave error 201"):
        gpu.map_shared(bytes(64), 100)
