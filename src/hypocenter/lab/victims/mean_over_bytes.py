"""The mean of a row is taken over its bytes."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit("norm_gpu", ("tl.sum(x * x, axis=0) / width", "tl.sum(x * x, axis=0) / (4 * width)"))


VICTIM = Victim(
    name="mean_over_bytes",
    title="rms_norm divides by the bytes of a row",
    cause=Cause.WRONG_ANSWER,
    symptom="differs",
    kernel="rms_norm",
    argument="x",
    also=("width", "out"),
    line="mean_square = tl.sum(x * x, axis=0) / (4 * width)",
    device="sim:rx7900xtx",
    source="sglang#30989",
    plant=plant,
)
