"""A load of 256 columns from rows of 64, with nothing to mask the rest off."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

LOAD = "tl.load(x_ptr + source * width + column, mask=inside, other=0.0)"


def plant(lab: Lab) -> None:
    lab.edit("embedding_gpu", (LOAD, LOAD.replace(", mask=inside, other=0.0", "")))


VICTIM = Victim(
    name="gather_without_mask",
    title="gather reads past the last row of its input",
    truth=Truth(
        causes=(Cause.MISSING_MASK,),
        kernels=("gather",),
        arguments=("x",),
        lines=("value = tl.load(x_ptr + source * width + column)",),
    ),
    symptom="none",
    device="sim:h200",
    source="LightLLM#1459",
    plant=plant,
)
