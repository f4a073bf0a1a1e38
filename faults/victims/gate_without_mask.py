"""The tail of a row is not masked off."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

STORE = "tl.store(gate_ptr + at, _gate(x, up, KIND), mask=inside)"


def plant(lab: Lab) -> None:
    lab.edit("activation_gpu", (STORE, STORE.replace(", mask=inside", "")))


VICTIM = Victim(
    name="gate_without_mask",
    title="gate stores 256 columns of rows that have 128",
    truth=Truth(
        causes=(Cause.MISSING_MASK,),
        kernels=("gate",),
        arguments=("gate",),
        lines=("tl.store(gate_ptr + at, _gate(x, up, KIND))",),
    ),
    symptom="differs",
    on_card=True,
    source="Megatron-LM#7103",
    plant=plant,
)
