"""A stride that counts bytes where the kernel counts elements."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.edit(
        "linear_gpu",
        ("x_stride=from_x.strides[0]", "x_stride=4 * from_x.strides[0]"),
    )


VICTIM = Victim(
    name="stride_in_bytes",
    title="linear steps over x by bytes",
    truth=Truth(
        causes=(Cause.WRONG_STRIDE,), kernels=("linear_float",), arguments=("x", "x_stride")
    ),
    symptom="differs",
    on_card=True,
    source="FlagGems#5896",
    plant=plant,
)
