"""A weight of no bytes: its address is 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType
from hypocenter.device import memory
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    def empty(weight: Any) -> Any:
        none = memory.allocate_undefined("nothing", "lab", DType.F32, (0,), device=lab.device)
        # torch has an address for no bytes, too; this is an allocation that nobody made.
        nowhere = replace(none.allocation, id=-1, address=0)
        return replace(weight, allocation=nowhere, data=lab.pointer(0, DType.F32))

    lab.disarm()
    lab.change_layer(0, attn_norm=empty)


VICTIM = Victim(
    name="null_weight",
    title="rms_norm gets a null pointer for its weight",
    truth=Truth(causes=(Cause.NULL_POINTER,), kernels=("rms_norm",), arguments=("weight",)),
    symptom="crash",
    on_card=True,
    source="GRETA CORE",
    address="is the null page",
    plant=plant,
    twin=Lab.disarm,
)
