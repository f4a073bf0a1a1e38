"""Operands of XF32 products: float32 with ten bits behind the point."""

from __future__ import annotations

import numpy as np
import pytest

from hypocenter.device.amd.matrix import _nearest_xf32


@pytest.mark.parametrize(("given", "wanted"), [
    (1.0, 1.0),
    (1.0 + 2.0**-11, 1.0),  # a tie goes to the even one
    (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),
    (1.0 + 2.0**-11 + 2.0**-20, 1.0 + 2.0**-10),
    (-(1.0 + 2.0**-10), -(1.0 + 2.0**-10)),
    (float("inf"), float("inf")),
])  # fmt: skip
def test_the_nearest_one_is_taken(given: float, wanted: float) -> None:
    assert _nearest_xf32(int(np.float32(given).view(np.uint32))) == wanted


def test_nan_stays_nan() -> None:
    assert np.isnan(_nearest_xf32(0x7F800001))
