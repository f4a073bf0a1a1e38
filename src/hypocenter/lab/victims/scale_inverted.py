"""Attention scores are multiplied by what they should be divided by."""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model.layers import attending


def plant(lab: Lab) -> None:
    def invert(original: Any, *given: Any, scale: float, **keywords: Any) -> None:
        original(*given, scale=1 / scale, **keywords)

    lab.wrap(attending, "attention", invert)


VICTIM = Victim(
    name="scale_inverted",
    title="attention is called with 1 / scale",
    cause=Cause.WRONG_ANSWER,
    symptom="differs",
    kernel="attention",
    argument="scale",
    device="sim:h200",
    source="vllm#56579",
    plant=plant,
)
