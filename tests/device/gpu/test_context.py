"""The driver's context, made while torch is imported, with a driver that is only pretended."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from hypocenter.base.errors import MissingPackage
from hypocenter.device.gpu import presence
from hypocenter.device.gpu.context import begin_context


class Driver:
    """Answers each call by a status, and writes it down."""

    def __init__(self, **status: int) -> None:
        self.status, self.calls = status, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            last = args[-1]
            number = last.value if isinstance(last, ctypes._SimpleCData) else last
            self.calls.append((name, int(number)))
            return self.status.get(name, 0)

        return call


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "context":
            thread.join()


def made(driver: Any, vendor: str = "cuda", index: int = 3) -> list[str]:
    """The libraries that were loaded."""
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        if isinstance(driver, Exception):
            raise driver
        return driver

    begin_context(vendor, index, load)
    wait()
    return loaded


def test_the_context_of_the_gpu_that_is_named_is_made_and_kept() -> None:
    driver = Driver()
    assert made(driver) == ["libcuda.so.1"]
    assert [name for name, _ in driver.calls] == [
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
    ]
    assert driver.calls[1] == ("cuDeviceGet", 3)


@pytest.mark.parametrize(("refused", "num_calls"), [("cuInit", 1), ("cuDeviceGet", 2)])
def test_what_the_driver_refuses_is_left_to_torch(refused: str, num_calls: int) -> None:
    driver = Driver(**{refused: 100})
    made(driver)
    assert len(driver.calls) == num_calls
    assert made(OSError("no driver")) == ["libcuda.so.1"]
    assert made(Driver(), vendor="hip") == []


def test_it_is_begun_before_torch_is_imported_and_not_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(presence, "begin_context", lambda *given: begun.append(given))
    monkeypatch.setattr(presence, "_refuse_other_vendor", lambda *given: None)
    monkeypatch.setattr(presence, "_refuse_absent", lambda *given: None)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    presence.find_gpu("cuda:1")
    assert begun == []
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:2])  # what is built in or frozen
    with pytest.raises(MissingPackage):
        presence.find_gpu("cuda:1")
    assert begun == [("cuda", 1)]
