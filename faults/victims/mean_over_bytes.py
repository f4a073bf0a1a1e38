"""The mean of a row is taken over its bytes."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.edit("norm_gpu", ("tl.sum(x * x, axis=0) / width", "tl.sum(x * x, axis=0) / (4 * width)"))


VICTIM = Victim(
    name="mean_over_bytes",
    title="rms_norm divides by the bytes of a row",
    truth=Truth(
        causes=(Cause.WRONG_ANSWER,),
        kernels=("rms_norm",),
        arguments=("x", "width", "out"),
        lines=("mean_square = tl.sum(x * x, axis=0) / (4 * width)",),
    ),
    symptom="differs",
    device="sim:rx7900xtx",
    source="sglang#30989",
    plant=plant,
)
