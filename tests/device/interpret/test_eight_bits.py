"""Numbers that become 8 bits in the interpreter: rounded as torch does, and held to the largest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hypocenter.base.dtypes import Array
from hypocenter.device.interpret.eight_bits import is_rounded_here, to_eight_bits

_TORCHS = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def _given(name: str) -> Array:
    """Every number of the format, the middles of two, their neighbours, and what is no number."""
    codes = torch.arange(256, dtype=torch.uint8).view(_TORCHS[name]).to(torch.float32).numpy()
    numbers = np.sort(codes[np.isfinite(codes)])
    middles = (numbers[:-1] + numbers[1:]) / 2
    near = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    others = np.array([0.0, -0.0, 1e-30, np.nan], np.float32)
    return np.concatenate([numbers, middles, *near, others]).astype(np.float32)


@pytest.mark.parametrize("name", _TORCHS)
def test_each_number_becomes_the_nearest_one(name: str) -> None:
    given = _given(name)
    wanted = torch.from_numpy(given).to(_TORCHS[name]).to(torch.float32).numpy()
    made = to_eight_bits(given[None], "fp32", name)
    assert made.shape == (1, len(given))
    found = torch.from_numpy(made.reshape(-1)).view(_TORCHS[name]).to(torch.float32).numpy()
    np.testing.assert_array_equal(found.view(np.uint32)[np.isfinite(wanted)],
                                  wanted.view(np.uint32)[np.isfinite(wanted)])  # fmt: skip
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", _TORCHS)
def test_what_is_finite_and_too_large_becomes_the_largest(name: str) -> None:
    top = torch.finfo(_TORCHS[name]).max
    made = to_eight_bits(np.array([1e30, -1e30, top * 1.2]), "fp64", name)
    found = torch.from_numpy(made).view(_TORCHS[name]).to(torch.float32)
    assert found.tolist() == [top, -top, top]


@pytest.mark.parametrize("name", _TORCHS)
def test_what_is_infinite_stays_so_where_the_format_has_it(name: str) -> None:
    made = to_eight_bits(np.array([np.inf, -np.inf]), "fp64", name)
    found = torch.from_numpy(made).view(_TORCHS[name]).to(torch.float32).numpy()
    wanted = [np.inf, -np.inf] if name == "fp8e5" else [np.nan, np.nan]
    np.testing.assert_array_equal(found, wanted)


def test_halves_of_either_kind_are_read() -> None:
    numbers = torch.tensor([127.5, -0.3, 2.0])
    wanted = numbers.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    halves = numbers.to(torch.float16).numpy()
    assert to_eight_bits(halves, "fp16", "fp8e4nv").tolist() == wanted
    bits = numbers.to(torch.bfloat16).view(torch.uint16).numpy()
    assert to_eight_bits(bits, "bf16", "fp8e4nv").tolist() == wanted
    assert not is_rounded_here("fp8e5", "fp8e4nv")
    assert not is_rounded_here("fp32", "fp16")
