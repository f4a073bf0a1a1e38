"""A hint that promises the compiler an alignment which is not there."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


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
    truth=Truth(
        causes=(Cause.MISALIGNMENT,),
        kernels=("rms_norm",),
        arguments=("out", "out_stride"),
        lines=("out_at = out_ptr + tl.multiple_of(row * out_stride + head * width, 128) + column",),
    ),
    symptom="none",
    source="triton#1330",
    plant=plant,
    twin=twin,
)
