"""A kernel gets the address of host memory."""

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
    def on_host(weight: Any) -> Any:
        at_home = memory.allocate(weight.name, weight.owner, DType.F32, weight.shape)
        return replace(at_home, data=lab.pointer(at_home.address, DType.F32))

    lab.disarm()
    lab.change_layer(0, ffn_norm=on_host)


VICTIM = Victim(
    name="host_pointer",
    title="rms_norm gets the address of a pinned host buffer",
    truth=Truth(causes=(Cause.HOST_POINTER,), kernels=("rms_norm",), arguments=("weight",)),
    symptom="crash",
    on_card=True,
    source="sglang#33968",
    plant=plant,
    twin=Lab.disarm,
)
