"""The tail of a row is not masked off."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

STORE = "tl.store(gate_ptr + at, _gate(x, up, KIND), mask=inside)"


def plant(lab: Lab) -> None:
    lab.edit("activation_gpu", (STORE, STORE.replace(", mask=inside", "")))


VICTIM = Victim(
    name="gate_without_mask",
    title="gate stores 256 columns of rows that have 128",
    cause=Cause.MISSING_MASK,
    symptom="differs",
    kernel="gate",
    argument="gate",
    line="tl.store(gate_ptr + at, _gate(x, up, KIND))",
    source="Megatron-LM#7103",
    plant=plant,
)
