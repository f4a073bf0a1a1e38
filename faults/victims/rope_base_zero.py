"""A rope base of 0: every frequency but the first is infinite."""

from __future__ import annotations

from faults.lab import Lab
from faults.model import model_path
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.model = model_path(rope_base=0.0)


VICTIM = Victim(
    name="rope_base_zero",
    title="the file asks for a rope base of 0",
    truth=Truth(
        causes=(Cause.BAD_SCALAR,),
        kernels=("rope",),
        arguments=("freq_base", "rope_base", "base", "rope.freq_base", "llama.rope.freq_base"),
    ),
    symptom="error",
    source="GRETA CORE",
    plant=plant,
)
