"""One weight lies on another GPU, and the contract sees it."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.lab.victims.wrong_device import elsewhere


def plant(lab: Lab) -> None:
    lab.change_layer(1, ffn_norm=elsewhere)


VICTIM = Victim(
    name="wrong_device_refused",
    title="a weight on another GPU, refused when the plan is made",
    cause=Cause.WRONG_DEVICE,
    symptom="error",
    kernel="rms_norm",
    argument="weight",
    source="triton#2441",
    plant=plant,
)
