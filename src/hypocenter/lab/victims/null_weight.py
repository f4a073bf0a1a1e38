"""A weight of no bytes: its address is 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypocenter.base.tensor import DType
from hypocenter.device import memory
from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


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
    cause=Cause.NULL_POINTER,
    symptom="crash",
    kernel="rms_norm",
    argument="weight",
    source="GRETA CORE",
    address="is the null page",
    plant=plant,
    twin=Lab.disarm,
)
