"""What a GPU packs with torch has the bits of what the host packs; here on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ops.kernel_launch import random_rows

from hypocenter.base.tensor import WEIGHT_TYPES, DType
from hypocenter.device import arrays
from hypocenter.kernels.weights import gpu_layout


def _there(data: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(data.copy())


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_torch_packs_the_bytes_that_numpy_packs(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_layout, "_DEVICE_SLAB", 768 * 64)  # three slabs, the last one short
    raw = random_rows(dtype, 150, 768)
    there = gpu_layout.pack_units(raw, dtype, 768, _there)
    here = gpu_layout.pack_units(raw, dtype, 768)
    assert len(there) == len(here)
    for found, expected in zip(there, here, strict=True):
        if not arrays.is_array(expected):
            assert found == expected
            continue
        assert isinstance(found, torch.Tensor)
        assert arrays.kind_of(found) == arrays.kind_of(expected)
        assert found.shape == expected.shape
        assert arrays.bits_as(found.reshape(-1), "uint8").numpy().tobytes() == expected.tobytes()


def test_scales_that_are_no_numbers_are_packed_alike() -> None:
    raw = random_rows(DType.Q4_0, 64, 256)
    raw[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    raw[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    there, here = (gpu_layout.pack_units(raw, DType.Q4_0, 256, way) for way in (_there, np.asarray))
    assert there[4] == here[4]
    np.testing.assert_array_equal(there[1].numpy(), here[1])


def test_an_array_knows_where_it_lies_and_how_much_it_holds() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for array in (values, torch.from_numpy(values)):
        assert arrays.address_of(array) == values.ctypes.data
        assert (arrays.size_of(array), arrays.kind_of(array)) == (6, "float32")
        assert arrays.is_array(array)
        assert arrays.largest_size(array[:0]) == 0.0
    assert not arrays.is_array(np.float32(1))
    assert not arrays.is_array(1.0)
