"""One weight lies on another GPU."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, memory
from hypocenter.doctor.causes import Cause


def elsewhere(weight: Any) -> Any:
    values = copies.to_host(weight)
    other = devices.open_device("sim:h200")
    there = memory.allocate(weight.name, weight.owner, DType.F32, weight.shape, device=other)
    copies.to_device(there, values)
    return there


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_layer(1, ffn_norm=elsewhere)


VICTIM = Victim(
    name="wrong_device",
    title="the norm of a layer was put on another GPU",
    truth=Truth(causes=(Cause.WRONG_DEVICE,), kernels=("rms_norm",), arguments=("weight",)),
    symptom="crash",
    source="triton#2441, mamba#1003",
    plant=plant,
    twin=Lab.disarm,
)
