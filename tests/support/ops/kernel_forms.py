"""The forms in which a test of an op runs it: kernels of the CPU, and those of a GPU."""

from __future__ import annotations

import pytest

from hypocenter.device import devices, plan
from ops import guard_pages, kernel_launch

#: On the CPU by one thread, by many, and next to pages that must not be touched; and a GPU.
FORMS = ("one thread", "many threads", "guard pages", "sim:mi300x")


def use_form(form: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have `kernel_launch` run ops in one of the FORMS; the device of it."""
    if form.startswith("sim:"):
        monkeypatch.setattr(kernel_launch, "device", devices.open_device(form))
        return form
    if form == "guard pages":
        guard_pages.install(monkeypatch)
    monkeypatch.setattr(plan, "MIN_PARALLEL_WORK", 0 if form == "many threads" else 1 << 62)
    return "cpu"
