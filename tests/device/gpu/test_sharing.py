"""What is asked of a driver about two GPUs; the driver is a pretended one."""

from __future__ import annotations

import ctypes
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
