"""Tensors of more than 2 GiB: what Triton tells AMD's compiler of their offsets, and what comes."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, memory
from hypocenter.device.interpret.interpret import Pointer

GPU = "emu:mi300x"
#: Elements of float32, 2.6 GiB of which hardly a page is touched; and one behind 2 GiB.
MANY, FAR = 700_000_000, 600_000_000


@triton.jit
def put_far(x_ptr, at_ptr, value):  # noqa: ANN001, ANN201
    at = tl.load(at_ptr)
    tl.store(x_ptr + at + tl.arange(0, 64), value)


@pytest.mark.parametrize(("num_elements", "place"), [(MANY, FAR), (MANY, 5), (4096, 5)])
def test_an_element_behind_two_gib_is_stored_where_it_belongs(
    num_elements: int, place: int
) -> None:
    devices.open_device(GPU)
    gpu: Any = devices.backend_of(GPU)
    x = memory.allocate("x", "test", DType.F32, (num_elements,), device=GPU)
    at = memory.allocate("at", "test", DType.I64, (1,), device=GPU)
    try:
        copies.to_device(at, np.array([place]))
        pointers = Pointer(x.address, "float32"), Pointer(at.address, "int64")
        gpu.launcher(put_far)(*pointers, 7.0, grid=(1,), num_warps=1)
        devices.synchronise(GPU)
        found = gpu.copy_out(x.address + 4 * place, 256)
        assert set(np.asarray(found).view(np.float32)) == {7.0}
    finally:
        memory.free(x)
        memory.free(at)


def test_only_pointers_into_so_much_memory_are_told_apart() -> None:
    devices.open_device(GPU)
    gpu: Any = devices.backend_of(GPU)
    x = memory.allocate("x", "test", DType.F32, (MANY,), device=GPU)
    small = memory.allocate("small", "test", DType.F32, (4096,), device=GPU)
    seen: list[tuple[str, ...]] = []
    try:
        for given in (x, small):
            pointer = Pointer(given.address, "float32")
            specimen = gpu.specimen_of(
                put_far, {"x_ptr": pointer, "at_ptr": pointer, "value": 7.0}, {"num_warps": 1}
            )
            seen.append(specimen.huge)
    finally:
        memory.free(x)
        memory.free(small)
    assert seen == [("x_ptr", "at_ptr"), ()]
