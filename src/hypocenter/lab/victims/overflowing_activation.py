"""An activation grows beyond what f32 holds."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

OLD = "tl.store(gate_ptr + at, _gate(x, up, KIND), mask=inside)"


def plant(lab: Lab) -> None:
    lab.edit("activation_gpu", (OLD, OLD.replace("KIND)", "KIND) * 1e38")))


VICTIM = Victim(
    name="overflowing_activation",
    title="gate multiplies by a scale that was meant for another format",
    cause=Cause.NONFINITE_VALUE,
    symptom="nonfinite",
    kernel="gate",
    argument="gate",
    line="tl.store(gate_ptr + at, _gate(x, up, KIND) * 1e38, mask=inside)",
    source="FasterTransformer#353",
    plant=plant,
)
