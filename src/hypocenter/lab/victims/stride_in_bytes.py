"""A stride that counts bytes where the kernel counts elements."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit(
        "linear_gpu",
        ("= from_x, 1, (from_x.strides[0], 0)", "= from_x, 1, (4 * from_x.strides[0], 0)"),
    )


VICTIM = Victim(
    name="stride_in_bytes",
    title="linear steps over x by bytes",
    cause=Cause.WRONG_STRIDE,
    symptom="differs",
    kernel="linear_float_few",
    argument="x",
    also=("x_stride",),
    source="FlagGems#5896",
    plant=plant,
)
