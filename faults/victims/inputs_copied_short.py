"""The copy that fills a step's inputs is of the bytes that the step before needed."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import copies
from hypocenter.doctor.causes import Cause


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
    truth=Truth(causes=(Cause.CHANGED_INPUT,), kernels=("lookup_float",), arguments=("counts",)),
    symptom="differs",
    source="vllm#48214",
    plant=plant,
    twin=Lab.disarm,
)
