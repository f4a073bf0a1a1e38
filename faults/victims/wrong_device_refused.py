"""One weight lies on another GPU, and the contract sees it."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from faults.victims.wrong_device import elsewhere
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.change_layer(1, ffn_norm=elsewhere)


VICTIM = Victim(
    name="wrong_device_refused",
    title="a weight on another GPU, refused when the plan is made",
    truth=Truth(causes=(Cause.WRONG_DEVICE,), kernels=("rms_norm",), arguments=("weight",)),
    symptom="error",
    source="triton#2441",
    plant=plant,
)
