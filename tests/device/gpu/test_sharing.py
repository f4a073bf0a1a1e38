"""What is asked of a driver about two GPUs; the driver is a pretended one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hypocenter.base.errors import NotShareable
from hypocenter.device.gpu.sharing import SharingDriver


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
