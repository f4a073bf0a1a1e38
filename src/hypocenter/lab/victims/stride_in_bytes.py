"""A stride that counts bytes where the kernel counts elements."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit(
        "linear_gpu",
        ("x_stride=from_x.strides[0]", "x_stride=4 * from_x.strides[0]"),
    )


VICTIM = Victim(
    name="stride_in_bytes",
    title="linear steps over x by bytes",
    cause=Cause.WRONG_STRIDE,
    symptom="differs",
    kernel="linear_float",
    argument="x",
    also=("x_stride",),
    source="FlagGems#5896",
    plant=plant,
)
