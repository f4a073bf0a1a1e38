"""A hint that promises the compiler an alignment which is not there."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit(
        "norm_gpu",
        (
            "out_at = out_ptr + row * out_stride + at",
            "out_at = out_ptr + tl.multiple_of(row * out_stride + head * width, 128) + column",
        ),
    )


def twin(lab: Lab) -> None:
    lab.edit(
        "norm_gpu",
        (
            "out_at = out_ptr + row * out_stride + at",
            "out_at = out_ptr + tl.multiple_of(row * out_stride + head * width, 64) + column",
        ),
    )


VICTIM = Victim(
    name="false_alignment_hint",
    title="rms_norm says that rows of 64 begin at multiples of 128",
    cause=Cause.MISALIGNMENT,
    symptom="none",
    kernel="rms_norm",
    argument="out",
    also=("out_stride",),
    line="out_at = out_ptr + tl.multiple_of(row * out_stride + head * width, 128) + column",
    source="triton#1330",
    plant=plant,
    twin=twin,
)
