"""The copy that fills a step's inputs is of the bytes that the step before needed."""

from __future__ import annotations

from typing import Any

from hypocenter.device import copies
from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    copied: list[int] = []

    def first_ones(original: Any, tensor: Any, values: Any, **keywords: Any) -> None:
        if tensor.owner == "step":
            copied.append(len(values))
            values = values if len(copied) == 1 else values[:64]  # the token ids and no more
        original(tensor, values, **keywords)

    lab.disarm()
    lab.wrap(copies, "to_device", first_ones)


VICTIM = Victim(
    name="inputs_copied_short",
    title="from the second step on the copy of the inputs ends behind the token ids",
    cause=Cause.CHANGED_INPUT,
    symptom="differs",
    kernel="lookup_float",
    argument="counts",
    source="vllm#48214",
    plant=plant,
    twin=Lab.disarm,
)
