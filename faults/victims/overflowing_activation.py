"""An activation grows beyond what f32 holds."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

OLD = "tl.store(gate_ptr + at, _gate(x, up, KIND), mask=inside)"


def plant(lab: Lab) -> None:
    lab.edit("activation_gpu", (OLD, OLD.replace("KIND)", "KIND) * 1e38")))


VICTIM = Victim(
    name="overflowing_activation",
    title="gate multiplies by a scale that was meant for another format",
    truth=Truth(
        causes=(Cause.NONFINITE_VALUE,),
        kernels=("gate",),
        arguments=("gate",),
        lines=("tl.store(gate_ptr + at, _gate(x, up, KIND) * 1e38, mask=inside)",),
    ),
    symptom="nonfinite",
    source="FasterTransformer#353",
    plant=plant,
)
