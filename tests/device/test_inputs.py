"""What the host fills before a step: one copy for all, with the checks of each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hypocenter.base.errors import CopyRejected
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.inputs import Inputs

SIM = "sim:h200"
SHAPES = {"ids": (5,), "counts": (2,), "tables": (3, 70)}


@pytest.fixture(params=["cpu", SIM])
def inputs(request: pytest.FixtureRequest) -> Inputs:
    if request.param == SIM:
        pytest.importorskip("triton")
        devices.open_device(SIM)
    return Inputs("inputs", "test", SHAPES, device=request.param)


def ints(*values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def held(inputs: Inputs) -> dict[str, Any]:
    return {name: copies.to_host(tensor).tolist() for name, tensor in inputs.tensors.items()}


def test_leading_parts_are_filled_and_rows_of_a_matrix_end_in_zeros(inputs: Inputs) -> None:
    ids, counts, tables = inputs.tensors.values()
    inputs.put(((ids, ints(1, 2, 3, 4, 5)), (tables, np.full((3, 70), 9, np.int32))))
    inputs.put(((ids, ints(7, 8)), (counts, ints(2, 1)), (tables, ints([4, 5], [6, 7]))))
    found = held(inputs)
    assert found["ids"] == [7, 8, 3, 4, 5]
    assert found["counts"] == [2, 1]
    assert found["tables"] == [[4, 5] + [0] * 68, [6, 7] + [0] * 68, [9] * 70]


def test_tensors_lie_in_one_allocation_without_touching(inputs: Inputs) -> None:
    tensors = list(inputs.tensors.values())
    assert len({one.allocation.id for one in tensors}) == 1
    assert all(one.address % 256 == tensors[0].address % 256 for one in tensors)
    for one, behind in itertools.pairwise(tensors):
        assert one.address + one.extent_bytes <= behind.address
    assert tensors[-1].end_bytes <= tensors[0].allocation.num_bytes


def test_one_copy_takes_what_is_filled_and_nothing_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    devices.open_device(SIM)
    inputs = Inputs("inputs", "test", SHAPES, device=SIM)
    sizes: list[int] = []
    backend: Any = devices.backend_of(SIM)
    copy_in = backend.copy_in

    def count(address: int, data: Any, **keywords: Any) -> None:
        sizes.append(data.nbytes)
        copy_in(address, data, **keywords)

    monkeypatch.setattr(backend, "copy_in", count)
    ids, counts, tables = inputs.tensors.values()
    inputs.put(((ids, ints(7)), (counts, ints(1, 1)), (tables, ints([4]))))
    assert sizes == [4 * (tables.offset + 70)]  # the first row of three
    inputs.put(((ids, ints(7)), (counts, ints(1, 1))))
    assert sizes[1:] == [4 * (counts.offset + 2)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.zeros(6, np.int32), "shape (6,) into (5,)"),
        (np.zeros(2, np.int64), "int64 values for I32"),
        (np.zeros((1, 2), np.int32), "shape (1, 2) into (5,)"),
        ([1, 2], "is no array of the host"),
    ],
)
def test_what_does_not_fit_changes_nothing(inputs: Inputs, given: Any, words: str) -> None:
    ids, counts, _ = inputs.tensors.values()
    before = held(inputs)
    with pytest.raises(CopyRejected, match="ids") as caught:
        inputs.put(((counts, ints(3, 3)), (ids, given)))
    assert words in str(caught.value)
    assert held(inputs) == before


def test_freed_inputs_are_refused(inputs: Inputs) -> None:
    ids = inputs.tensors["ids"]
    memory.free(ids)
    with pytest.raises(CopyRejected, match="was freed"):
        inputs.put(((ids, ints(1)),))


def test_a_tensor_with_memory_of_its_own_is_copied_by_itself(inputs: Inputs) -> None:
    ids, counts, _ = inputs.tensors.values()
    apart: Tensor = memory.allocate("ids", "test", DType.I32, (5,), device=ids.device)
    inputs.put(((apart, ints(1, 2)), (counts, ints(2, 1))))
    assert copies.to_host(apart).tolist() == [1, 2, 0, 0, 0]
    assert held(inputs)["ids"] == [0] * 5
    twin = replace(ids, name="twin")  # another view of the same place is not ours either
    inputs.put(((twin, ints(6)),))
    assert held(inputs)["ids"][0] == 6
