"""Attention scores are multiplied by what they should be divided by."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers import attending


def plant(lab: Lab) -> None:
    def invert(original: Any, *given: Any, scale: float, **keywords: Any) -> None:
        original(*given, scale=1 / scale, **keywords)

    lab.wrap(attending, "attention", invert)


VICTIM = Victim(
    name="scale_inverted",
    title="attention is called with 1 / scale",
    truth=Truth(causes=(Cause.WRONG_ANSWER,), kernels=("attention",), arguments=("scale",)),
    symptom="differs",
    on_card=True,
    device="sim:h200",
    source="vllm#56579",
    plant=plant,
)
