"""A load of 256 columns from rows of 64, with nothing to mask the rest off."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

LOAD = "tl.load(x_ptr + source * width + column, mask=inside, other=0.0)"


def plant(lab: Lab) -> None:
    lab.edit("embedding_gpu", (LOAD, LOAD.replace(", mask=inside, other=0.0", "")))


VICTIM = Victim(
    name="gather_without_mask",
    title="gather reads past the last row of its input",
    cause=Cause.MISSING_MASK,
    symptom="none",
    kernel="gather",
    argument="x",
    line="value = tl.load(x_ptr + source * width + column)",
    device="sim:h200",
    source="LightLLM#1459",
    plant=plant,
)
